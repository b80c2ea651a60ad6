"""`stoker completion`: the script that makes a shell complete verbs, options, jobs and tags."""

import sys

import click


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print what makes SHELL complete the words of `stoker`: verbs, options, ids and names of jobs, tags.

    \b
    bash   echo 'eval "$(stoker completion bash)"' >> ~/.bashrc
    zsh    echo 'eval "$(stoker completion zsh)"' >> ~/.zshrc
    fish   stoker completion fish > ~/.config/fish/completions/stoker.fish
    """
    from click.shell_completion import get_completion_class

    root = click.get_current_context().find_root()
    script = get_completion_class(shell)
    assert script is not None  # noqa: S101 - the three shells are those that click knows
    sys.stdout.write(script(root.command, {}, "stoker", "_STOKER_COMPLETE").source())
    return 0
