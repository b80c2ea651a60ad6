#!/usr/bin/env python3
"""GPU Sentinel under the name that programs import it by: `from gpu_sentinel import Sentinel, get_gpu_usage`."""

from stoker import Sentinel, SentinelState, get_gpu_usage
from stoker.dropin.gpu_sentinel import main

__all__ = ["Sentinel", "SentinelState", "get_gpu_usage", "main"]

if __name__ == "__main__":
    main()
