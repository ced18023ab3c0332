"""Around a unit, and code that bypasses it.

wrap_unit           Wrappers around a unit's forward; [Note: wrapping order]. Calls outside of a program.
module_hooks        Hooks that must run on the unit's stage.
autograd_functions  Custom autograd Functions and checkpoints in the glue.
inner_gradients     ``torch.autograd.grad`` in the glue.
"""
