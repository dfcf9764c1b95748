"""Ways to call dispatch and combine, by name, and which of them an engine has.

A name is a base and features, ``cached+fp8``. It is measured where ``Buffer.modes`` has all that
it needs, so that an engine which learns a mode is measured in it at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["DEFAULTS", "Mode", "available", "parse", "parse_any"]

_NEEDS = {
    "no_wait": "no_wait",
    "fp8": "scales",
    "cast": "quantize",
    "expand": "expand",
    "per_rank": "expand",
}
"""Base or feature → mode of ``engines.protocol.ALL_MODES``."""

_BASES = {
    "dispatch": ("uncached", "no_wait", "cached"),
    "combine": ("pool", "outside"),
    "roundtrip": ("uncached", "no_wait", "cached"),
}
_FEATURES = {
    "dispatch": ("fp8", "cast", "expand"),
    "combine": ("expand", "per_rank", "weights", "bias"),
    "roundtrip": (),
}
DEFAULTS = {
    "dispatch": ("no_wait", "uncached", "cached", "cached+fp8", "cached+cast", "no_wait+expand"),
    "combine": (
        *("outside", "pool", "outside+weights", "pool+weights", "pool+bias"),
        *("outside+per_rank", "pool+per_rank", "pool+expand"),
    ),
    "roundtrip": ("no_wait", "uncached", "cached"),
}
"""Operation → modes that are measured when none is named, as far as the engine has them. Combine
of rows outside the pool stands first: other libraries take rows from any memory."""


@dataclass(frozen=True)
class Mode:
    """One way to call one operation.

    Attributes:
        operation: ``dispatch``, ``combine`` or ``roundtrip``.
        base: ``uncached`` (the host waits for the counts), ``no_wait`` (it does not), ``cached``
            (on a handle); of combine ``pool`` or ``outside``: where its rows lie.
        features: ``fp8`` (rows with scales), ``cast`` (to FP8 on the way), ``expand`` (the
            expanded layout; combine: every copy travels), ``per_rank`` (combine of it: copies of
            a rank are added first), ``weights`` (combine: ``topk_weights`` travel along), ``bias``
            (combine: one, added first).
    """

    operation: str
    base: str
    features: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """``base+feature``."""
        order = _FEATURES[self.operation]
        return "+".join([self.base, *(name for name in order if name in self.features)])

    @property
    def needs(self) -> frozenset[str]:
        """Modes that the engine must have."""
        return frozenset(_NEEDS[word] for word in (self.base, *self.features) if word in _NEEDS)

    @property
    def capturable(self) -> bool:
        """Whether a graph can hold the call: the host must not wait in it."""
        return self.base != "uncached"

    @property
    def one_byte(self) -> bool:
        """Whether rows travel as FP8."""
        return bool(self.features & {"fp8", "cast"})

    @property
    def expanded(self) -> bool:
        """Whether the expanded layout is on either side."""
        return bool(self.features & {"expand", "per_rank"})


def parse(operation: str, text: str) -> Mode:
    """The mode of a name.

    Raises:
        ValueError: There is no such name; the message says which there are.
    """
    base, *features = text.split("+")
    bases, known = _BASES[operation], _FEATURES[operation]
    if base not in bases or not set(features) <= set(known):
        more = f", each with +{', +'.join(known)}" if known else ""
        raise ValueError(f"{operation} has the modes {', '.join(bases)}{more}, got {text!r}")
    chosen = frozenset(features)
    if chosen >= {"fp8", "cast"} or chosen >= {"expand", "per_rank"}:
        raise ValueError(f"{' and '.join(features)} do not go together, got {text!r}")
    return Mode(operation, base, chosen)


def parse_any(text: str) -> Mode:
    """The mode of a name of dispatch or of combine: their bases differ.

    Raises:
        ValueError: Neither has it.
    """
    return parse("combine" if text.partition("+")[0] in _BASES["combine"] else "dispatch", text)


def available(
    modes: Iterable[Mode], engine_modes: frozenset[str], dtype: str
) -> tuple[list[Mode], dict[str, str]]:
    """Split modes into those that can be measured and, by name, why the others cannot.

    Args:
        modes: Wanted.
        engine_modes: ``modes`` of a Buffer on this engine.
        dtype: Of the rows.
    """
    taken, left = [], {}
    for mode in modes:
        missing = sorted(mode.needs - engine_modes)
        if missing:
            left[mode.name] = f"the engine has no mode {', '.join(missing)} yet"
        elif "cast" in mode.features and dtype not in ("bfloat16", "float16", "float32"):
            left[mode.name] = f"{dtype} cannot be cast"
        elif mode.operation != "dispatch" and dtype.startswith(("float8", "void")):
            left[mode.name] = f"{dtype} cannot be added"
        else:
            taken.append(mode)
    return taken, left
