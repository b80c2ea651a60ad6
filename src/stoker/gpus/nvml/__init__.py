"""The `nvml` source: NVIDIA GPUs through the vendor's library, by nvidia-ml-py."""
