"""The order of the jobs that wait, as it is in the tables: one person at a time changes it."""

from collections.abc import Sequence

from stoker.errors import BadInputError
from stoker.queue.driver import Driver
from stoker.queue.model import Place, Side
from stoker.queue.moving import Waiting, beside, stepped


def moved(driver: Driver, ids: Sequence[str], place: Place) -> list[str]:
    """Those that wait, after they were moved among the jobs of their priority."""
    waiting = _waiting(driver)
    names = _those(waiting, ids)
    places = _places(driver, waiting, names, place) if names else {}
    driver.many("set position", [{"id": name, "position": at} for name, at in places.items()])
    return names


def moved_beside(driver: Driver, ids: Sequence[str], neighbour: str, side: Side) -> list[str]:
    """Those that wait, after they were put right beside that one."""
    waiting = _waiting(driver)
    other = next((job for job in waiting if job.id == neighbour), None)
    if other is None:
        raise BadInputError(f"nothing can be put {side} {neighbour}: no such job waits in {driver.place}")
    if neighbour in ids:
        raise BadInputError(f"job {neighbour} cannot be put {side} itself: name another that waits")
    names = _those(waiting, ids)
    places = beside(waiting, names, other, side) if names else {}
    equal = {"priority": other.priority}
    driver.many("set place", [{"id": name, "position": at, **equal} for name, at in places.items()])
    return names


def _waiting(driver: Driver) -> list[Waiting]:
    driver.fetch("lock queue", {})
    return [Waiting(*row) for row in driver.fetch("waiting jobs", {})]


def _those(waiting: Sequence[Waiting], ids: Sequence[str]) -> list[str]:
    """In the order that they have."""
    wanted = set(ids)
    return [job.id for job in waiting if job.id in wanted]


def _places(driver: Driver, waiting: Sequence[Waiting], names: Sequence[str], place: Place) -> dict[str, float]:
    match place:
        case "first":
            first = min(job.position for job in waiting) - len(names)
            return {name: first + number for number, name in enumerate(names)}
        case "last":
            return dict(zip(names, driver.positions(len(names)), strict=True))
        case "up" | "down":
            return stepped(waiting, set(names), place)
