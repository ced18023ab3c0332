"""Framework integrations: the only packages that know a training framework.

In reading order::

    lightning/      SMPStrategy for PyTorch Lightning, in both of its trees
    accelerate/     SMPPlugin for Accelerate, its launcher, and the Hugging Face Trainer
    autoload.py     registration with Lightning, Accelerate and transformers, at ``import torch``
    hydra/          config group ``smp``: resolvers and recipes
    sagemaker/      SageMaker's model parallel library; ``smp_strategy.smp`` exports it
"""
