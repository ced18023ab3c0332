"""Conversion between checkpoint formats: every reader gives ``CheckpointContents``, every writer takes them.

``CheckpointKind`` in :mod:`smp_strategy.checkpoint.storage.path_kind` lists the formats and recognises them.

In reading order:

===================== =================================================================================================
contents              The common form: weights, optimizer state, the rest, as lazy tensors.
detect_format         Opens a checkpoint of any format by the reader for it.
layouts               Finds weights and optimizer state in nested dicts; names of parameters.
readers               Files of ``torch.save``; sharded folders of ours, Lightning's, FSDP's, plain ``dcp.save``;
                      folders of Hugging Face, and of Accelerate's ``save_state``.
safetensors           Safetensors, with an index or without; reads and writes.
read_sagemaker        One file per rank of SageMaker's model parallel library; parts joined to whole tensors.
merge_adapters        Merges LoRA adapters of PEFT into the weights that they adapt.
writers               Our two forms: sharded folder, full file; safetensors, or a folder for ``from_pretrained``.
===================== =================================================================================================
"""
