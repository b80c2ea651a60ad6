#!/usr/bin/env python3
"""`gpu_idle_timeout` as a file: `python gpu_idle_timeout.py`, also as a copy, wherever Stoker is installed."""

from stoker.dropin.gpu_idle_timeout import main

if __name__ == "__main__":
    main()
