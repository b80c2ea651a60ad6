"""A process in which several threads read a queue: see `prepare_types`."""

import subprocess
import sys

import pytest

# msgspec asks for the annotations of a type when it is decoded for the first time.
_COUNT = """
import sys
import stoker.cli.options.selection, stoker.engines.local.engine  # with types that msgspec could not decode
from stoker.queue import {imported}
{prepared}
import msgspec
from stoker.queue.model import Job, View, Worker
asked = []
sys.setprofile(lambda frame, event, _: asked.append(event) if frame.f_code.co_name == "get_class_annotations" else None)
for kind in (Job, View, Worker):
    try:
        msgspec.json.decode(b"{{}}", type=kind)
    except msgspec.ValidationError:
        pass
sys.setprofile(None)
print(len(asked))
"""


@pytest.mark.parametrize("is_prepared", [True, False])
def test_prepared_types_are_ready_before_the_first_decoding(is_prepared: bool) -> None:
    program = _COUNT.format(
        imported="prepare_types" if is_prepared else "JobSpec", prepared="prepare_types()" if is_prepared else ""
    )
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert (int(asked.stdout) == 0) == is_prepared
