"""`stoker top`: GPUs and jobs live in the terminal."""
