"""Programs that others have made and people already use, each as a thin front on the rooms above."""
