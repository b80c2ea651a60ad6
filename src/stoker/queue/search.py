"""Job search: one syntax for `list`, the verbs, the API and the page, and the searchable text of each job.

Databases find parts of words by trigrams. Two spaces around each word give short words trigrams, too. SQLite indexes
trigrams with FTS5, PostgreSQL arrays of numbers with GIN.
"""

import contextlib
import functools
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from stoker.errors import BadInputError
from stoker.masking import masked_command
from stoker.queue.commands import shell_text
from stoker.queue.fields import JobSpec, State
from stoker.queue.table import literal
from stoker.units import LONGEST_SECONDS, parse_duration

Kind = Literal["any", "name", "command", "id", "tag", "group", "user", "machine", "since", "before", "parameter"]

LONGEST_QUERY: Final = 500
_MOST_TERMS: Final = 20
# Limits for commands that are scripts, and for their options.
_LONGEST_COMMAND: Final = 2000
_MOST_PARAMETERS: Final = 100
_LONGEST_PARAMETER: Final = 200

FIELDS_TO_SEARCH: Final = ("name", "command", "id", "tag", "group", "user", "machine", "state", "since", "before")
_WORD: Final = r'(?:[^\s"]|"[^"]*")+'
_FIELD: Final = r"(?s)([A-Za-z_]+):(.*)"
_PARAMETER: Final = r"(?s)-{0,2}([A-Za-z_][A-Za-z0-9_.-]*)=(.*)"
_OPTION: Final = r"--?[A-Za-z_][A-Za-z0-9_.-]*"
_QUOTING: Final = re.compile(r"""['"\\]""")
_NUMBER: Final = r"[+-]?(?:[0-9]{1,30}\.?[0-9]{0,30}|\.[0-9]{1,30})(?:e[+-]?[0-9]{1,3})?"
_AROUND: Final = "  "


class Term(msgspec.Struct, frozen=True):
    """One condition. Its text is in the form of `texts`; its time is in seconds since the epoch, or ago."""

    kind: Kind
    text: str = ""
    at: float = 0.0
    ago: bool = False


class Query(msgspec.Struct, frozen=True):
    """A conjunction of conditions. Without states, every state matches."""

    terms: tuple[Term, ...] = ()
    states: tuple[State, ...] = ()

    def narrowed(self, states: Sequence[State] = (), tag: str | None = None, group: str = "") -> "Query":
        """The query restricted to these states, this tag and this group. Raises if no state is left."""
        left = tuple(state for state in dict.fromkeys(states or self.states) if not self.states or state in self.states)
        if states and not left:
            raise BadInputError(f"no job is {' or '.join(self.states)} and {' or '.join(states)} at once")
        tagged = () if tag is None else (Term("tag", _token("#", tag)),)
        of_group = (Term("group", _token("@", group)),) if group else ()
        return Query((*self.terms, *tagged, *of_group), left)


EVERY_JOB: Final = Query()


class SortKey(msgspec.Struct, frozen=True):
    """A column for sorting. The statement `sort by NAME` has its value, which is never NULL."""

    name: str
    title: str
    descending: bool = False
    """The default direction."""


SORTS: Final[dict[str, SortKey]] = {
    key.name: key
    for key in (
        SortKey("submitted", "Newest", descending=True),
        SortKey("when", "Last change", descending=True),
        SortKey("name", "Name"),
        SortKey("state", "State"),
        SortKey("priority", "Priority", descending=True),
        SortKey("gpus", "GPUs", descending=True),
        SortKey("lasted", "Duration", descending=True),
    )
}
# Only this many newest matches are sorted, so that a list of a million jobs is instant in every order.
MOST_SORTED: Final = 10_000


class Sort(msgspec.Struct, frozen=True):
    """The order of a list."""

    by: str = "submitted"
    descending: bool = True

    def __str__(self) -> str:
        return self.by if self.descending == SORTS[self.by].descending else f"-{self.by}"


NEWEST_FIRST: Final = Sort()


def parse_sort(text: str) -> Sort:
    """Parses `name`, or `-name` for the other direction. Empty means newest first."""
    name = text.strip().removeprefix("-") or "submitted"
    if name not in SORTS:
        raise BadInputError(
            f"jobs cannot be sorted by {name[:40]!r}: choose {', '.join(SORTS)}, or one with - in front"
        )
    return Sort(name, SORTS[name].descending != text.strip().startswith("-"))


# Parsing


def parse_query(text: str) -> Query:
    """Parses `name:resnet state:failed since:2d lr=1e-3 "two words"`. Raises BadInputError."""
    if len(text) > LONGEST_QUERY:
        raise BadInputError(f"the search has {len(text):,} characters: at most {LONGEST_QUERY} are allowed")
    if text.count('"') % 2:
        raise BadInputError(f'the search {text[:60]!r} has a quote that is not closed: write both, as in "two words"')
    words = re.findall(_WORD, text.replace("\0", " "))
    if len(words) > _MOST_TERMS:
        raise BadInputError(f"the search has {len(words)} words: at most {_MOST_TERMS} are allowed")
    terms: list[Term] = []
    states: tuple[State, ...] | None = None
    for word in words:
        found = None if word.startswith('"') else re.fullmatch(_FIELD, word)
        if found and found[1].lower() == "state":
            if states is not None:
                raise BadInputError("the search has several states: write them as state:failed,cancelled")
            states = _states(found[2].replace('"', ""))
        elif found:
            terms.append(_of_field(found[1].lower(), found[2].replace('"', ""), word))
        elif (pair := re.fullmatch(_PARAMETER, word)) and not word.startswith('"'):
            terms.append(_parameter(pair[1], pair[2].replace('"', "")))
        elif sought := _sought(word.replace('"', "")):
            terms.append(Term("any", sought))
    return Query(tuple(terms), states or ())


def _of_field(field: str, value: str, word: str) -> Term:
    if field not in FIELDS_TO_SEARCH:
        raise BadInputError(
            f"jobs cannot be searched by {field!r}: the fields are {', '.join(FIELDS_TO_SEARCH)} "
            f'(quotes search for the text itself: "{word[:40]}")'
        )
    if not value.strip():
        raise BadInputError(f"{field}: says nothing to search for: write it like {_EXAMPLES[field]}")
    match field:
        case "since" | "before":
            at, ago = _time(field, value.strip())
            return Term("since" if field == "since" else "before", at=at, ago=ago)
        case "id":
            return Term("id", _AROUND + _folded(value))
        case "tag":
            return Term("tag", _token("#", value))
        case "group":
            return Term("group", _token("@", value))
        case "machine":
            return Term("machine", value.strip().lower())
        case "name" | "command" | "user" as kind:
            return Term(kind, _sought(value))
    raise AssertionError(field)


_EXAMPLES: Final = {
    "name": "name:resnet",
    "command": "command:train.py",
    "id": "id:3fa1",
    "tag": "tag:night",
    "group": "group:bert",
    "user": "user:alice",
    "machine": "machine:gpu1",
    "since": "since:2d",
    "before": "before:2026-01-31",
}


def _states(value: str) -> tuple[State, ...]:
    words = [word.strip().lower() for word in value.split(",")]
    if unknown := [word for word in words if word not in get_args(State)]:
        raise BadInputError(f"{unknown[0][:40]!r} is not a state of a job: those are {', '.join(get_args(State))}")
    return tuple(state for state in get_args(State) if state in words)


def _time(field: str, value: str) -> tuple[float, bool]:
    """Parses a duration ago, or a local date with or without a time."""
    try:
        if (seconds := parse_duration(value)) <= LONGEST_SECONDS:
            return seconds, True
    except BadInputError:
        try:
            return datetime.fromisoformat(value).timestamp(), False
        except (ValueError, OverflowError, OSError):
            pass
    raise BadInputError(
        f"{field}:{value[:40]} is not a time: write how long ago, like {field}:2d or {field}:90m, "
        f"or a date like {field}:2026-01-31 or {field}:2026-01-31T22:00"
    )


def _parameter(key: str, value: str) -> Term:
    """A term for a parameter with this whole value, or with any value."""
    token = f"{_AROUND}{_folded(key).replace('-', '_')}="
    return Term("parameter", f"{token}{_value(value)}{_AROUND}" if value.strip() else token)


def _sought(text: str) -> str:
    """The text to find, a part of one or more words. One or two characters match only the start of a word."""
    folded = _folded(text)
    return folded if len(folded) >= 3 or not folded else _AROUND + folded


# The text of a job


class Texts(NamedTuple):
    """The searchable text of a job."""

    name: str
    command: str
    marks: str
    """Id, tags, group and parameters."""
    owner: str


def texts(job: str, spec: JobSpec) -> Texts:
    """The searchable text of a job. Secrets are masked, since viewers could otherwise guess them by searching."""
    command = masked_command(shell_text(spec.command))
    tags = [_folded(tag) for tag in spec.tags]
    parameters = [f"{key}={value}" for key, value in dict.fromkeys(_parameters(spec.name, command))]
    whole = [*(_token("#", tag) for tag in spec.tags), *([_token("@", spec.group)] if spec.group else [])]
    marks = [job, *tags, *(token.strip() for token in whole), *parameters[:_MOST_PARAMETERS]]
    return Texts(
        _whole(spec.name),
        _whole(command[:_LONGEST_COMMAND]),
        _AROUND + _AROUND.join(marks) + _AROUND,
        _whole(spec.submitter),
    )


def _parameters(name: str, command: str) -> Iterator[tuple[str, str]]:
    """Parameters such as `lr=1e-3`, `--lr=1e-3` and `--lr 1e-3`."""
    command = command[:_LONGEST_COMMAND]
    words = command.split()
    if _QUOTING.search(command):  # otherwise the result is the same, and a sweep may have a hundred thousand jobs
        with contextlib.suppress(ValueError):
            words = shlex.split(command, comments=False)
    words = [*name.split(), *words]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if pair := re.fullmatch(_PARAMETER, word):
            key, value = pair[1], pair[2]
        elif re.fullmatch(_OPTION, word) and (
            not following.startswith("-") or re.fullmatch(_NUMBER, following.lower())
        ):
            key, value = word.lstrip("-"), following
        else:
            continue
        yield _folded(key).replace("-", "_"), _value(value)[:_LONGEST_PARAMETER]


def _value(text: str) -> str:
    """Normalizes a value: `1e-3` and `0.001` are equal."""
    folded = " ".join(_folded(text).split())
    if not re.fullmatch(_NUMBER, folded):
        return folded
    try:
        return str(int(folded))
    except ValueError:
        number = float(folded)
        return str(int(number)) if number.is_integer() and abs(number) < 2**53 else repr(number)


def _folded(text: str) -> str:
    """Normalizes case, and separates words by two spaces."""
    return _AROUND.join(text.replace("\0", " ").encode(errors="replace").decode().casefold().split())


def _token(kind: str, text: str) -> str:
    """A token that matches only as a whole, with single spaces between its words."""
    return f"{_AROUND}{kind}{' '.join(_folded(text).split())}{_AROUND}"


def _whole(text: str) -> str:
    return f"{_AROUND}{_folded(text)}{_AROUND}"


def trigrams(*parts: str) -> list[str]:
    """All distinct trigrams."""
    return list(dict.fromkeys(part[at : at + 3] for part in parts for at in range(len(part) - 2)))


def numbered(grams: Sequence[str]) -> str:
    """Trigrams as numbers in PostgreSQL's array syntax. Collisions are harmless, since the text is compared, too."""
    return "{" + ",".join(map(_number, grams)) + "}"


# Similar jobs are often submitted together.
@functools.lru_cache(maxsize=1 << 16)
def _number(gram: str) -> str:
    return str((ord(gram[0]) * 1_000_003 + ord(gram[1]) * 1009 + ord(gram[2])) % (2**31 - 1))


# SQL

# The newest jobs are scanned before the index is used, which would collect every match of a frequent word. Most
# searches fill a page from the first few.
_LOOKED_AT: Final = (200, 1000)
# Up to this many jobs with certain states or times are scanned instead of using the text index.
FEW: Final = 5000
_ALL: Final = 2**31 - 1
# Few jobs have these states, so all of them are scanned.
_FEW_STATES: Final[frozenset[State]] = frozenset({"held", "running"})
_WAITING: Final[frozenset[State]] = frozenset({"queued", "held"})
_ENDED: Final[frozenset[State]] = frozenset({"succeeded", "failed", "cancelled"})

Mark = tuple[float | str, float | str]
"""The end of a page: submission time of its last job and a tie-breaker; in other orders its value and id."""


def _rarest(term: Term) -> str:
    """The most selective text of a term: a parameter's value, since many jobs share the key."""
    key, equals, value = term.text.partition("=")
    return f"{key[-1:]}{equals}{value}" if term.kind == "parameter" and value else term.text


class SearchStatements(msgspec.Struct, frozen=True, kw_only=True):
    """A query in order of submission, as a series of statements. The next one runs if one finds too few jobs.

    `sql` returns named statements and fragments in the database's dialect.
    """

    query: Query
    sql: Callable[[str], str]
    are_fewer: Callable[[str, int], bool]
    """True if a source of rows has fewer than this."""
    descending: bool = True
    is_next: bool = False
    """It starts after a mark: the parameters `submitted` and `tie`."""
    limit: int | None = None
    """None for all jobs, by one statement."""

    def statements(self, columns: str) -> Iterator[str]:
        """The statements. `columns` are of `j`; a tie-breaker is added."""
        filters, grams, narrow = self._conditions()
        if not grams and not narrow:
            yield self._by_submission(columns, filters)
            return
        are_few = bool(self.query.states) and set(self.query.states) <= _FEW_STATES
        if not are_few:
            newest, further = _LOOKED_AT
            yield from self._among_newest(columns, newest, filters, grams)
            # Counting those in a rare state could read all ended jobs.
            if narrow and not self.query.states and self.are_fewer(f"({narrow}) n", further):
                yield self._among(columns, narrow, filters, grams)
                return
            yield from self._among_newest(columns, further, filters, grams)
        if are_few or (self.query.states and self.are_fewer(self._first_jobs(FEW, [], "1 AS found"), FEW)):
            yield self._among_first(columns, _ALL, filters, grams)
        elif narrow and (not grams or self.are_fewer(f"({narrow}) n", FEW)):
            yield self._among(columns, narrow, filters, grams)
        else:
            seq, source = self.sql("seq"), self.sql("found by text")
            conditions = [*filters, *self._in_states(), *self._after_seq(seq)]
            yield self._statement(f"{columns}, t.seq", source, conditions, seq)

    def parameters(self) -> dict[str, str | int | float | bytes | None]:
        values: dict[str, str | int | float | bytes | None] = {
            f"term{number}": term.text.strip() if term.kind == "id" else term.text or term.at
            for number, term in enumerate(self.query.terms)
        }
        grams = self._grams()
        words = " AND ".join('"{}"'.format(gram.replace('"', '""')) for gram in grams)
        return values | ({"words": words, "grams": numbered(grams)} if grams else {})

    def machines(self) -> dict[str, str]:
        """The requested parts of machine names, by the parameters that will hold the ids of their workers."""
        return {f"term{number}": term.text for number, term in enumerate(self.query.terms) if term.kind == "machine"}

    @property
    def _beyond(self) -> str:
        return "<" if self.descending else ">"

    def _grams(self) -> list[str]:
        """The required trigrams; none without a condition on the text."""
        return trigrams(
            *(_rarest(term) for term in self.query.terms if term.kind not in {"since", "before", "machine"})
        )

    def _conditions(self) -> tuple[list[str], list[str], str]:
        """Conditions on the job `j` and its text `t`, trigrams, and a narrower source of job ids."""
        filters, narrow = list[str](), list[str]()
        for number, term in enumerate(self.query.terms):
            time = " ago" if term.ago else " at"
            name = {"since": f"since{time}", "before": f"before{time}", "id": "id begins"}.get(
                term.kind, f"with {term.kind}"
            )
            filters.append(self._numbered(name, number))
            if term.kind == "machine":
                narrow.append(self._numbered("ran on machine", number))
            elif term.kind == "since":
                narrow.append(self._changed(number, time))
        return filters, self._grams(), narrow[0] if narrow else ""

    def _numbered(self, name: str, number: int) -> str:
        return self.sql(name).replace("term", f"term{number}")

    def _changed(self, number: int, time: str) -> str:
        """A statement for the ids of jobs that entered these states since then."""
        parts = []
        for states, name in (
            (_ENDED, f"ended since{time}"),
            (_WAITING, f"submitted since{time}"),
            (frozenset[State](("running",)), "running now"),
        ):
            wanted = [state for state in self.query.states if state in states] if self.query.states else sorted(states)
            if wanted:
                parts.append(f"{self._numbered(name, number)} AND c.state IN ({', '.join(map(literal, wanted))})")
        return " UNION ALL ".join(parts)

    def _in_states(self) -> list[str]:
        return [f"j.state IN ({', '.join(map(literal, self.query.states))})"] if self.query.states else []

    def _by_submission(self, columns: str, filters: Sequence[str]) -> str:
        """A statement that uses the index of all jobs, or of jobs per state."""
        columns, order, conditions = f"{columns}, j.position", ("j.submitted", "j.position"), self._after_last()
        if len(self.query.states) > 1:
            return self._statement(columns, self._first_jobs(self.limit, [*filters, *conditions]), [], *order)
        return self._statement(columns, "stoker_jobs j", [*self._in_states(), *filters, *conditions], *order)

    def _among_newest(self, columns: str, most: int, filters: Sequence[str], grams: Sequence[str]) -> Iterator[str]:
        """A statement that scans the newest `most` jobs, if those can fill a page."""
        if self.limit is not None and self.limit <= most:
            yield self._among_first(columns, most, filters, grams)

    def _among_first(self, columns: str, most: int, filters: Sequence[str], grams: Sequence[str]) -> str:
        """A statement that scans the first jobs in these states."""
        if not grams:
            source = self._first_jobs(most, self._after_last())
            return self._statement(f"{columns}, j.position", source, filters, "j.submitted", "j.position")
        joined = [*filters, "t.job_id = j.id", *self._after_seq("t.seq")]
        return self._statement(f"{columns}, t.seq", self._first_texts(most), joined, "t.seq")

    def _among(self, columns: str, ids: str, filters: Sequence[str], grams: Sequence[str]) -> str:
        """A statement that scans the jobs with these ids."""
        source, joined = f"({ids}) n CROSS JOIN stoker_jobs j", ["j.id = n.id", *filters, *self._in_states()]
        if not grams:
            joined += self._after_last()
            return self._statement(f"{columns}, j.position", source, joined, "j.submitted", "j.position")
        joined += ["t.job_id = j.id", *self._after_seq("t.seq")]
        return self._statement(f"{columns}, t.seq", f"{source} {self.sql('text_of_job')}", joined, "t.seq")

    def _statement(self, columns: str, source: str, conditions: Sequence[str], *order: str) -> str:
        return self._first(self.limit, columns, source, conditions, *order)

    def _first(self, limit: int | None, columns: str, source: str, conditions: Sequence[str], *order: str) -> str:
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        way = "DESC" if self.descending else "ASC"
        ordered = ", ".join(f"{one} {way}" for one in order)
        most = "" if limit is None else f" LIMIT {limit:d}"
        return f"SELECT {columns} FROM {source}{where} ORDER BY {ordered}{most}"  # noqa: S608  # our own pieces

    def _after_last(self) -> list[str]:
        last = f"({self.sql('last submitted')}, {self.sql('last position')})"
        return [f"(j.submitted, j.position) {self._beyond} {last}"] if self.is_next else []

    def _after_seq(self, seq: str) -> list[str]:
        return [f"{seq} {self._beyond} {self.sql('last seq')}"] if self.is_next else []

    def _submitted_before(self) -> list[str]:
        """Conditions for the index: a job that changed before a time was submitted before it."""
        return [
            self._numbered("submitted before ago" if term.ago else "submitted before at", number)
            for number, term in enumerate(self.query.terms)
            if term.kind == "before"
        ]

    def _first_jobs(self, limit: int | None, conditions: Sequence[str], columns: str = "*") -> str:
        """The first jobs, selected per state, because the index finds the newest jobs of one state only."""
        of_state = [[f"j.state = {literal(state)}"] for state in self.query.states] or [list[str]()]
        within = [*self._submitted_before(), *conditions]
        parts = [
            self._first(limit, columns, "stoker_jobs j", [*state, *within], "j.submitted", "j.position")
            for state in of_state
        ]
        return "(" + " UNION ALL ".join(f"SELECT * FROM ({part}) AS one" for part in parts) + ") j"  # noqa: S608  # the same

    def _first_texts(self, limit: int) -> str:
        """The first texts, joined with their jobs."""
        if not self.query.states and not self._submitted_before():
            part = self._first(limit, "*", "stoker_texts t", self._after_seq("t.seq"), "t.seq")
            return f"({part}) t {self.sql('job_of_text')}"
        after = list[str]()
        if self.is_next and limit == _ALL:
            after = [f"j.submitted {self._beyond}= {self.sql('last submitted')}"]
        elif self.is_next:
            # Each state starts right after the last job, since not all of many simultaneous jobs are scanned. If that
            # job was deleted, the scan finds nothing, and the index is used.
            after = [
                f"(j.submitted, j.position) {self._beyond} ({self.sql('last submitted')}, ({self.sql('last place')}))"
            ]
        return f"{self._first_jobs(limit, after)} {self.sql('text_of_job')}"
