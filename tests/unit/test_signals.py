"""Detection of a double Ctrl-C at the terminal."""

import signal

from stoker.runs.processes.signals import DOUBLE_PRESS, DoublePress, Received

PRESSED = Received(signal.SIGINT, 0x80, 0, 0)
BY_A_PROGRAM = Received(signal.SIGINT, 0, 4242, 1000)


class Terminal:
    def __init__(self) -> None:
        self.now = 0.0
        self.double_press = DoublePress(lambda: self.now)

    def presses(self, *signals: Received, every: float) -> list[bool]:
        results = []
        for received in signals:
            results.append(self.double_press.is_second(received))
            self.now += every
        return results


def test_two_presses_in_a_row_are_a_double_press() -> None:
    assert Terminal().presses(PRESSED, PRESSED, every=DOUBLE_PRESS) == [False, True]


def test_presses_further_apart_are_single_presses() -> None:
    assert Terminal().presses(PRESSED, PRESSED, PRESSED, every=DOUBLE_PRESS + 0.1) == [False, False, False]


def test_sigint_from_a_program_is_not_a_press() -> None:
    assert not any(Terminal().presses(*[BY_A_PROGRAM] * 5, every=0.0))
    assert not any(Terminal().presses(PRESSED, BY_A_PROGRAM, every=0.0))


def test_other_terminal_signals_are_not_a_press() -> None:
    assert not any(Terminal().presses(*[Received(signal.SIGQUIT, 0x80, 0, 0)] * 3, every=0.0))
