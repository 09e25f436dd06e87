"""Memory of this process or of its GPU: what is held now, and the peak since a mark."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from pathlib import Path

import torch


def environment() -> dict[str, str]:
    """The environment for a process to measure: glibc gives freed blocks back at once, so that its size is what it holds."""
    return {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def mark(device: torch.device) -> None:
    """Start a new peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    elif _clear_refs().exists():
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        _clear_refs().write_text("5", encoding="ascii")


def held(device: torch.device) -> int:
    """Bytes held now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS")


def peak(device: torch.device) -> int:
    """Most bytes held at once since :func:`mark` (where the system can't start anew: since the process began)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def _clear_refs() -> Path:
    return Path("/proc") / str(os.getpid()) / "clear_refs"


def _status(field: str) -> int:
    """A field of Linux' process status, in bytes; elsewhere the process's peak."""
    path = Path("/proc") / str(os.getpid()) / "status"
    if path.exists():
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
