#!/usr/bin/env python3
"""`gpu_mon` as a file: `python gpu_mon.py`, also as a copy, wherever Stoker is installed."""

from stoker.dropin.gpu_mon import main

if __name__ == "__main__":
    main()
