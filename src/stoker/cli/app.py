"""The `stoker` command: its verbs, exit codes and error messages."""

import contextlib
import errno
import gc
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from stoker.cli.options.common import CONFIGURABLE, option_defaults
from stoker.errors import BadInputError, StokerError
from stoker.gpus.spawn import Helper
from stoker.masking import without_passwords
from stoker.paths import state_home, tighten_home
from stoker.settings import load_settings
from stoker.streams import ERROR, emit, warn
from stoker.version import __version__

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class VerbModule(NamedTuple):
    """The module of a verb, which defines `NAME_command`, and its line in `stoker --help`."""

    module: str
    help: str


# By purpose, in the order in which a newcomer needs them. The module of a verb is imported only when the verb is typed.
GROUPS: Final = {
    "Watch": {
        "gpus": VerbModule("verbs.gpus", "Show what this machine's GPUs are doing."),
        "run": VerbModule("verbs.run", "Launch a command and stop it when it idles or hangs."),
        "watch": VerbModule("verbs.watch", "Watch GPUs and act when they idle or hang."),
        "snooze": VerbModule("verbs.pause", "Pause the rules of a run for a while."),
        "runs": VerbModule("verbs.show", "List runs and how they ended."),
        "record": VerbModule("verbs.gpus", "Write readings over time to a file."),
        "replay": VerbModule("verbs.replay", "Apply rules to recorded readings."),
    },
    "Queue": {
        "submit": VerbModule("verbs.submit", "Put commands into the queue."),
        "clone": VerbModule("verbs.edit", "Submit a job again, with changes."),
        "work": VerbModule("verbs.work", "Run the queue's jobs, on this machine or a cluster."),
        "list": VerbModule("verbs.show", "List the jobs of the queue."),
        "show": VerbModule("verbs.show", "Show one job or run in detail."),
        "why": VerbModule("verbs.show", "Explain why a job waits."),
        "diff": VerbModule("verbs.show", "Show how a job's code differs."),
        "logs": VerbModule("verbs.logs", "Print the output of a job."),
        "wait": VerbModule("verbs.wait", "Wait until jobs have ended."),
        "cancel": VerbModule("verbs.steer", "Cancel jobs; running ones are stopped."),
        "retry": VerbModule("verbs.steer", "Run jobs again that have ended."),
        "edit": VerbModule("verbs.edit", "Change the options of jobs."),
        "move": VerbModule("verbs.steer", "Move jobs within the queue."),
        "hold": VerbModule("verbs.steer", "Prevent jobs from starting."),
        "release": VerbModule("verbs.steer", "Let held jobs start."),
        "tag": VerbModule("verbs.steer", "Add a tag to jobs, or remove it."),
        "pause": VerbModule("verbs.pause", "Stop starting jobs, in the queue or on one worker."),
        "resume": VerbModule("verbs.pause", "Start jobs again after a pause."),
        "machines": VerbModule("machines", "List, add, drain and remove the machines of the queue."),
        "feed": VerbModule("verbs.feed", "Submit jobs from a text file or a Google Sheet."),
        "queue": VerbModule("verbs.queue", "Create or check the queue."),
        "clean": VerbModule("verbs.queue", "Delete jobs that ended long ago."),
    },
    "Fill and fit": {
        "fill": VerbModule("verbs.fill", "Run background programs on idle GPUs."),
        "fit": VerbModule("verbs.fit", "Find the largest batch size that fits."),
    },
    "Page": {
        "up": VerbModule("verbs.up", "Start page, worker and queue on this machine."),
        "serve": VerbModule("verbs.serve", "Serve the page and the HTTP API."),
        "top": VerbModule("top", "Watch GPUs and jobs live in the terminal."),
        "tokens": VerbModule("verbs.serve", "Manage access to the page."),
        "notify": VerbModule("verbs.serve", "Send notifications about the queue."),
    },
    "Tools": {
        "doctor": VerbModule("verbs.doctor", "Check what Stoker can see on this machine."),
        "sim": VerbModule("verbs.sim", "Control simulated GPUs."),
        "completion": VerbModule("app", "Print a shell completion script."),
    },
}
VERBS: Final = {name: verb for group in GROUPS.values() for name, verb in group.items()}
OWN_FAILURE: Final = 125
INTERRUPTED: Final = 130
# Errors of the machine, not of Stoker: a full disk, and too few processes, memory or descriptors.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_SHORT: Final = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


class Verbs(click.Group):
    """The verbs, imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"stoker.cli.{VERBS[cmd_name].module}")
        command = getattr(module, f"{cmd_name}_command")
        assert isinstance(command, click.Command)  # noqa: S101 - every verb has one
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> "list[CompletionItem[Any]]":
        """Completes verbs without importing them."""
        from click.shell_completion import CompletionItem

        verbs = [CompletionItem(name, help=verb.help) for name, verb in VERBS.items() if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        for title, verbs in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, verb.help) for name, verb in verbs.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="stoker %(version)s")
@click.option("--config", metavar="FILE", help="Read settings from FILE instead of stoker.toml.")
@click.option("--debug", is_flag=True, help="Show tracebacks and the output of the helper process.")
@click.pass_context
def stoker(context: click.Context, config: str | None, debug: bool) -> None:
    """Keep GPUs busy, and notice when they are not."""
    gc.freeze()
    gc.enable()
    if config is not None:
        os.environ["STOKER_CONFIG"] = config
    if debug:
        os.environ["STOKER_DEBUG"] = "1"
    with contextlib.suppress(StokerError):  # a verb that needs a state directory reports that
        if (problem := tighten_home(state_home())) is not None:
            warn(problem)
    verb = context.invoked_subcommand
    if verb in CONFIGURABLE and (command := stoker.get_command(context, verb)) is not None:
        try:
            context.default_map = {verb: option_defaults(verb, getattr(load_settings(), verb), command.params)}
        except BadInputError as error:
            # All other exit codes of `stoker run` are the command's.
            raise StokerError(str(error), exit_code=OWN_FAILURE if verb == "run" else error.exit_code) from None


def run(arguments: list[str], early: Helper | None = None) -> int:
    """Runs one command line and returns its exit code. Tracebacks are shown only with --debug."""
    try:
        result = stoker.main(arguments, prog_name="stoker", standalone_mode=False, obj=early)
        sys.stdout.flush()
    except (click.ClickException, StokerError) as error:
        return _refused(error)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output is gone (`| head`), which is not an error.
        _discard_output()
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            _discard_output()
            _say(f"cannot write: {os.strerror(error.errno).lower()}")
            return OWN_FAILURE
        if os.environ.get("STOKER_DEBUG"):
            raise
        if isinstance(error, OSError) and error.errno in _SHORT:
            _say(f"this machine is out of resources: {str(error.strerror).lower()}")
        elif isinstance(error, PermissionError) and error.filename is not None:
            _say(f"{os.fsdecode(error.filename)}: permission denied")
        else:
            _say(f"internal error: {type(error).__name__}: {error} (run with --debug and report the traceback)")
        return OWN_FAILURE
    return result if isinstance(result, int) else 0


def _discard_output() -> None:
    """Otherwise Python flushes again at exit, and a failure changes the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused(error: click.ClickException | StokerError) -> int:
    """Prints one sentence; returns the exit code."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
    elif isinstance(error, click.ClickException):
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "stoker"
        _say(f"{error.format_message().rstrip('.')} (see `{command} --help`)")
    else:
        _say(str(error))
    return error.exit_code


def _say(message: str) -> None:
    emit(ERROR, f"stoker: {without_passwords(message)}\n")


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> int:
    """Print a script that completes `stoker` in SHELL: verbs, options, ids and names of jobs, tags.

    \b
    bash   echo 'eval "$(stoker completion bash)"' >> ~/.bashrc
    zsh    echo 'eval "$(stoker completion zsh)"' >> ~/.zshrc
    fish   stoker completion fish > ~/.config/fish/completions/stoker.fish
    """
    from click.shell_completion import get_completion_class

    root = click.get_current_context().find_root()
    script = get_completion_class(shell)
    assert script is not None  # noqa: S101 - click knows all three
    sys.stdout.write(script(root.command, {}, "stoker", "_STOKER_COMPLETE").source())
    return 0
