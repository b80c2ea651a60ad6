"""The statements that list jobs, put together from named pieces; each stays quick whatever the history."""

from collections.abc import Sequence

from stoker.queue.driver import Driver, Parameters
from stoker.queue.fields import State
from stoker.queue.model import Failure, Job, Order
from stoker.queue.rows import clean_text, job_of, literal


def jobs(driver: Driver, states: Sequence[State], tag: str | None, order: Order, limit: int, offset: int) -> list[Job]:
    parameters = dict[str, str | int | float | None](limit=limit, offset=offset)
    if tag is not None:
        parameters["tag"] = clean_text(tag)
    sql = driver.sql("all jobs" if tag is None else "tagged jobs")
    if states:
        # Written out, so that the planner knows how many jobs are in them.
        sql += f" WHERE j.state IN ({', '.join(literal(state) for state in states)})"
    sql += " " + driver.sql("newest first" if order == "newest" else "in order")
    return [job_of(row) for row in driver.fetch_text(sql, parameters)]


def page(
    driver: Driver, states: Sequence[State], tag: str | None, before: tuple[float, float] | None, limit: int
) -> list[Job]:
    parameters = dict[str, str | int | float | None]()
    conditions = []
    if before is not None:
        parameters |= {"submitted": float(before[0]), "position": float(before[1])}
        conditions.append(driver.sql("older_than_last"))
    if tag is not None:
        parameters["tag"] = clean_text(tag)
    chosen = driver.sql("all jobs" if tag is None else "tagged jobs")
    # Written out, for of a number that it does not know PostgreSQL believes that it is a tenth of the table.
    newest = f"{driver.sql('newest')} LIMIT {max(0, limit):d}"
    # Each state by itself: its newest are found by an index, those of several together are not.
    parts = [
        _part(chosen, [f"j.state = {literal(state)}", *conditions], newest) for state in dict.fromkeys(states)
    ] or [_part(chosen, conditions, newest)]
    if len(parts) == 1:
        return [job_of(row) for row in driver.fetch_text(parts[0], parameters)]
    each = [f"SELECT * FROM ({part}) AS one" for part in parts]  # noqa: S608  # put together from our own pieces
    sql = f"SELECT * FROM ({' UNION ALL '.join(each)}) AS j {newest}"  # noqa: S608  # the same
    return [job_of(row) for row in driver.fetch_text(sql, parameters)]


def _part(chosen: str, conditions: Sequence[str], newest: str) -> str:
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"{chosen}{where} {newest}"


def ended_since(driver: Driver, at: float, limit: int) -> list[Job]:
    sql = f"{driver.sql('ended since')} LIMIT {max(0, limit):d}"
    return [job_of(row) for row in driver.fetch_text(sql, {"at": float(at)})]


def failed_since(driver: Driver, at: float, limit: int) -> list[Job]:
    sql = f"{driver.sql('failed since')} LIMIT {max(0, limit):d}"
    return [job_of(row) for row in driver.fetch_text(sql, {"at": float(at)})]


def failures(driver: Driver, kind: Failure, at: float, limit: int) -> list[Job]:
    sql = f"{driver.sql('unseen failures')} LIMIT {max(0, limit):d}"
    return [job_of(row) for row in driver.fetch_text(sql, _failures(kind, at))]


def count_failures(driver: Driver, kind: Failure, at: float) -> int:
    return int(driver.fetch("count unseen failures", _failures(kind, at))[0][0])


def see_failures(driver: Driver, kind: Failure, until: float) -> float:
    rows = driver.fetch("seen failures", {"seen": _seen(kind)})
    driver.fetch("see failures", {"seen": _seen(kind), "until": float(until)})
    return float(rows[0][0]) if rows else 0.0


def _failures(kind: Failure, at: float) -> Parameters:
    return {"at": float(at), "seen": _seen(kind), "by_rule": int(kind == "stopped")}


def _seen(kind: Failure) -> str:
    return f"seen: {kind}"


def in_line(driver: Driver, limit: int) -> list[Job]:
    return [job_of(row) for row in driver.fetch_text(f"{driver.sql('in line')} LIMIT {max(0, limit):d}", {})]


def ahead(driver: Driver, job: Job, most: int) -> int:
    sql = f"SELECT count(*) FROM ({driver.sql('ahead')} LIMIT {max(0, most):d}) AS counted"  # noqa: S608  # our own pieces
    return int(driver.fetch_text(sql, _place(job))[0][0])


def neighbours(driver: Driver, job: Job) -> tuple[str | None, str | None]:
    ((before, behind),) = driver.fetch("neighbours", _place(job))
    return before, behind


def _place(job: Job) -> Parameters:
    """What decides the order of those that wait."""
    return {"priority": job.priority, "position": job.position, "submitted": job.submitted, "id": job.id}
