"""A worker on another machine: installed, started and stopped over ssh."""
