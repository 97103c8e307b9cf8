"""Makes Triton's interpreter faster, with the same results.

The interpreter replaces the builtins of `triton.language` before a launch, and looks
for builtins to replace again at each call of a device function within it: 40 % of the
time of a launch.
"""

from triton import language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang


def patch_once(fn):
    """Replace the builtins that `fn` sees, unless a caller of `fn` has done so.

    Returns:
        What undoes the replacements that were made.
    """
    seen = fn.__globals__.values()
    loads = [lang.load for lang in (tl, tl.core) if any(lang is each for each in seen)]
    if any(map(tl.core.is_builtin, [*loads, tl.tensor.__add__])):
        return _patch_lang(fn)
    return interpreter._LangPatchScope()
