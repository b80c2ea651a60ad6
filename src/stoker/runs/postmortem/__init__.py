"""The report on a stopped run and everything that collects it."""
