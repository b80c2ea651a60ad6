"""The worker: claims jobs for an engine and sees them through; the same for every engine."""
