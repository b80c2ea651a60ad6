"""The code of a job as it was at its submission: packed, stored once per content, compared."""
