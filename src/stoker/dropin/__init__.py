"""Replacements for gpu_idle_timeout, GPU Sentinel and gpu_mon, with their options, output and exit codes."""
