"""The loss of the batch, from the losses of its microbatches.

loss_weights   Terms of the losses of a step, with weights by their numbers of elements.
loss_terms     Which calls are such terms.
varying_counts Counts of the loss that differ between microbatches and that nothing of the batch tells.
batch_record   What a program computes from its batch, to be repeated for other microbatches.
batch_facts    How tensors of the batch cover its samples.
sample_watch   Finds losses that compare the samples of a batch, beside the dry run.
sample_rows    Which places of a tensor belong to which samples.
"""
