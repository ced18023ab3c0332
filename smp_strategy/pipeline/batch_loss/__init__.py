"""The loss of the batch, from the losses of its microbatches.

loss_weights   Terms of the losses of a step, with weights by their numbers of elements.
loss_terms     Which calls are such terms.
batch_record   What a program computes from its batch, to be repeated for other microbatches.
batch_facts    How tensors of the batch cover its samples.
sample_watch   Finds losses that compare the samples of a batch, in the dry run.
sample_spread  Where the samples are in a tensor of the glue, and operations that mix them.
sample_order   Which samples are along a dim, after operations that rearrange them.
"""
