"""What the levels of torch.func do with a call of an autograd.Function: custom_function_call.

A Function stands above the dispatcher: no kernel is asked, so each level has a rule here, with the
Function and its operands as they come. A rule deals with its own level and calls again for those
below; below all levels it is the Function itself.

    Grad, Jvp       a Function of that one level, whose backward and jvp are the class's own
    Vmap            the class's `vmap`; or, with generate_vmap_rule, the class over the batch: a
                    Function again, whose every method runs under a level of vmap
    Functionalize   an error, as in torch

The rules are those of torch/_functorch/autograd_function.py, and its errors. Beyond it, a generated
rule honours mark_dirty and mark_non_differentiable, tangents that are None, and other tensors saved
for forward than for backward; a tangent that no result can have is an error.

    levels.py      the rules
    batches.py     the generated one: a Function over a batch, and its gradients
    contexts.py    what the methods of one example see as ctx

decomps/activation/functions.py puts them where torch looks for them.
"""

from normpass.decomps.autograd_function.levels import RULES

__all__ = ["RULES"]
