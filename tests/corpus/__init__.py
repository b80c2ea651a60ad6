"""Labelled traces of GPU jobs, made from published cases: what rules and their peers are measured on."""

from tests.corpus import healthy, idle, stalled, unknown  # noqa: F401 - they register their classes
from tests.corpus.trace import HALVES, LABELS, SEED, Half, Label, Trace, TraceClass, corpus, trace_classes

__all__ = ["HALVES", "LABELS", "SEED", "Half", "Label", "Trace", "TraceClass", "corpus", "trace_classes"]
