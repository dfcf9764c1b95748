"""Calls from flat lists of named values: what is of a plan or of the options goes there."""

from dataclasses import fields

from deepep_cupy.api.call_cache import CallCache
from deepep_cupy.engines.calls import (
    CombineArguments,
    CombineCall,
    CombineOptions,
    CombinePlan,
    DispatchArguments,
    DispatchCall,
    DispatchOptions,
    DispatchPlan,
)

__all__ = ["always_checked", "arguments_of", "combine_call", "dispatch_call"]

_ARGUMENTS = {
    "dispatch": (DispatchArguments, DispatchOptions),
    "combine": (CombineArguments, CombineOptions),
}


def arguments_of(operation, values):
    """The arguments of an operation, as ``Buffer`` puts them together."""
    arguments, options = _ARGUMENTS[operation]
    given, chosen = _split(values, options._fields)
    return arguments(**given, options=options(**chosen))


def dispatch_call(x, **values):
    """A checked dispatch with a plan of its own."""
    given, found = _split(values, _names(DispatchPlan))
    return DispatchCall(x, **given, plan=DispatchPlan(**found))


def combine_call(x, routing, topk_weights=None, biases=(), **values):
    """A checked combine with a plan of its own."""
    given, found = _split(values, _names(CombinePlan))
    return CombineCall(x, routing, topk_weights, biases, **given, plan=CombinePlan(**found))


def always_checked(checker, most_tokens):
    """Makes calls of arguments, and finds no plan of an earlier call."""
    return CallCache(checker, lambda value, strided: None, most_tokens)


def _names(plan):
    return {each.name for each in fields(plan)} - {"streams"}


def _split(values, names):
    """Values without those of these names, and these."""
    rest = {name: value for name, value in values.items() if name not in names}
    return rest, {name: value for name, value in values.items() if name in names}
