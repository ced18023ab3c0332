"""Tensors of the glue that stages share or keep, and in-place changes of them.

arguments           Preparation of call arguments.
tensor_memory       Memory of placed tensors, and its in-place changes.
aliasing            In-place changes of placed tensors, also through views.
replicated_tensors  In-place changes of tensors that every stage has.
kept_tensors        Placed tensors that outlive their step.
glue_parameters     Parameters of units that code above the units uses.
weight_operations   Operations of the glue on weights of other stages, which no dry run has seen.
"""
