"""The two configurations that gpu_mon was published with, letter by letter."""

from typing import Final

_HEAD: Final = """\
[defaults]
; how frequently perform GPU and tty checks
interval_seconds=10

; configuration of GPUs to monitor for external program access. It could be several such sections with 'gpu-' prefix
[gpu-all]
; list of comma-separated gpu indices or ALL to handle all available gpus
gpus=ALL
; comma-separated list of programs which can access gpu and should be ignored
ignore_programs=nvidia-smi

"""
_TAIL: Final = """\
; configuration of tty monitoring if enabled and user is active and not in whitelist, all processes will be stopped
[tty]
enabled=True
whitelist=user1,user2
; how long user should be inactive in tty to be ignored by checker
idle_seconds=300
"""


def _process(name: str, command: str, gpus: str) -> str:
    return f"""\
; program which will be started on gpu during idle time
[process-{name}]
dir=/tmp
cmd={command}
; list of gpu indices or ALL to handle all available gpus
gpus={gpus}
; log for processes. If not specified, show on console, if specified to file, data will be appended
log=/dev/null

"""


ONE_FOR_ALL: Final = _HEAD + _process("all", "miner-run", "ALL") + _TAIL
# The second command has two spaces behind it, as published.
ONE_FOR_EACH: Final = _HEAD + _process("0", "miner-run", "0") + _process("1", "miner-run  ", "1") + _TAIL
