"""Candidate fixes of the compiler, each put into the running torch by a context manager.

A fix is a replacement of lines that it recognises in the installed torch; where they are not there
exactly once, it refuses. The same replacement, made in a copy of the source file, is the patch that
``upstream/`` holds for each release. ``fixes`` has the lines, ``install`` puts them in.

``python -m omni_kv.upstream FIX SCRIPT [ARGUMENTS]`` runs a script with a fix put in;
``python -m omni_kv.upstream --diff FIX`` prints the fix as a patch against the installed torch.

Every function here raises RuntimeError on entry, if the installed torch does not have the lines.
"""

from __future__ import annotations

import contextlib

from omni_kv.upstream.install import diff, installed

__all__ = [
    "aliasing_in_cache_key",
    "diff",
    "input_storage_offset",
    "installed",
    "overlap_check",
    "symbolic_synthetic_base",
    "view_storage_offset",
]


def overlap_check() -> contextlib.AbstractContextManager[None]:
    """Let the reinplace pass ask whether tensors overlap, not whether they share a storage.

    Its own TODO says so: "this logic can be made more precise using _overlap".
    """
    return installed("overlap-check")


def input_storage_offset() -> contextlib.AbstractContextManager[None]:
    """Let ``as_strided`` on a graph input count from the storage, as torch 2.13 does.

    A graph input's pointer includes its storage offset, an explicit offset of ``aten.as_strided``
    does not. Only that op is changed: lowerings of other ops call the function with offsets that
    count from the pointer.
    """
    return installed("input-storage-offset")


def view_storage_offset() -> contextlib.AbstractContextManager[None]:
    """Lower the storage offset of a view to what the graph says it is, not to 0.

    ``aten.sym_storage_offset`` gets a lowering like those of ``sym_size`` and ``sym_stride``. Where
    ``as_strided`` counts from a graph input's pointer (before torch 2.13), that goes with it: there
    the two faults cancel each other for some views.
    """
    return installed("view-storage-offset")


def aliasing_in_cache_key() -> contextlib.AbstractContextManager[None]:
    """Let the keys of the compile caches see which inputs share a storage, and where they start.

    Both caches, of AOTAutograd and of Inductor, make their key from ``FxGraphHashDetails``. The key
    of inputs that share nothing and start at 0 says nothing more than before.
    """
    return installed("aliasing-in-cache-key")


def symbolic_synthetic_base() -> contextlib.AbstractContextManager[None]:
    """Make a synthetic base of a storage whose size is symbolic."""
    return installed("symbolic-synthetic-base")
