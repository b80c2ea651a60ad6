"""A queue with a long history, written straight into its tables: submitting a million jobs would take minutes."""

from pathlib import Path

from stoker.queue import JobSpec, Store
from stoker.queue.fields import shape_of
from stoker.queue.search import numbered, trigrams

NUMBERS = {
    "sqlite": "WITH RECURSIVE numbers (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :count)",
    "postgres": "WITH numbers (n) AS (SELECT generate_series(1, %(count)s))",
}
# All over the place, as real ones are, and each once.
ID = {
    "sqlite": "printf('%08x', n * 2654435761 & 4294967295)",
    "postgres": "lpad(to_hex(CAST(n AS BIGINT) * 2654435761 & 4294967295), 8, '0')",
}
SPEC = '{"command":["python","train.py","--lr","1e-3"],"directory":"/home/somebody/project","environment":{}}'
JOBS = """
INSERT INTO stoker_jobs
  (id, name, state, priority, position, shape, spec, retries, retries_left, attempts, attempt, submitted, started,
  ended)
{numbers}
SELECT {id}, 'run ' || n, CASE WHEN n {modulo} 10 = 0 THEN 'failed' ELSE 'succeeded' END, 0, n, '{shape}',
  '{spec}', 0, 0, 1, 'a' || n, {began} + n * {every}, {began} + n * {every} + 1, {began} + n * {every} + 2
FROM numbers
"""
ATTEMPTS = """
INSERT INTO stoker_attempts (id, job_id, worker_id, number, gpus, started, lease_expires, ended, outcome)
{numbers}
SELECT 'a' || n, {id}, 'w' || (n {modulo} 1000), 1, '[]', {began} + n * {every} + 1, {began} + n * {every} + 61,
  {began} + n * {every} + 2, 'succeeded' FROM numbers
"""
FINDINGS = """
INSERT INTO stoker_attempt_details (attempt_id, cause, rule, report, fit, written)
SELECT attempt, CASE WHEN length(attempt) {modulo} 2 = 0 THEN 'idle' ELSE 'time limit' END,
  CASE WHEN length(attempt) {modulo} 2 = 0 THEN 'idle' ELSE '' END, '', '{{}}', ended
FROM stoker_jobs WHERE state = 'failed'
"""
USAGE = """
INSERT INTO stoker_usage (host, gpu, minute, job, background, somebody, free, unknown)
{numbers}
SELECT 'h' || (n {modulo} 4), 'g', n, 60, 0, 0, 0, 0 FROM numbers WHERE n <= 20000
"""


WORDS = ("  run  ", "  python  train.py  --lr  1e-3  ", "  sweep  #sweep  lr=0.001  ", "  alice  ")
TEXTS = """
INSERT INTO stoker_texts (job_id, name, command, marks, owner{grams_column})
SELECT id, '{name}' || {number} || '  ', '{command}', '{marks}' || id || '  seed=' || {number} || '  ', '{owner}'{grams}
FROM stoker_jobs ORDER BY submitted, position
"""
NUMBER = "CAST(CAST(position AS INTEGER) AS TEXT)"
# The numbers of `stoker.queue.search.numbered`.
NUMBERED = """
CREATE FUNCTION pg_temp.numbered(word TEXT) RETURNS INTEGER[] LANGUAGE sql IMMUTABLE AS $$
  SELECT array_agg(CAST((CAST(ascii(substr(word, n, 1)) AS BIGINT) * 1000003 + ascii(substr(word, n + 1, 1)) * 1009
    + ascii(substr(word, n + 2, 1))) %% 2147483647 AS INTEGER)) FROM generate_series(1, length(word) - 2) n $$
"""


def write_texts(queue: Store) -> None:
    """What all jobs of this queue are searched by: words that all have, and the number and the id of each."""
    driver, is_file = queue._driver, Path(queue.place).exists()
    name, command, marks, owner = WORDS
    pieces = {"name": name, "command": command, "marks": marks, "owner": owner, "number": NUMBER}
    if is_file:
        driver.fetch_text(TEXTS.format(**pieces, grams_column="", grams=""), {})
        return
    grams = f", CAST(%(grams)s AS INTEGER[]) || pg_temp.numbered('  ' || {NUMBER} || '  ')"
    grams += f" || pg_temp.numbered('seed=' || {NUMBER} || '  ') || pg_temp.numbered(id)"
    index = "CREATE INDEX stoker_texts_grams ON stoker_texts USING gin (grams)"
    for sql in (NUMBERED, "DROP INDEX stoker_texts_grams"):
        driver.fetch_text(sql, {})
    text = TEXTS.format(**pieces, grams_column=", grams", grams=grams)
    driver.fetch_text(text, {"grams": numbered(trigrams(*WORDS, "  seed="))})
    for sql in (index, "VACUUM ANALYZE stoker_texts"):
        driver.fetch_text(sql, {})


def write_history(queue: Store, count: int, began: float = 1000.0, every: float = 1.0) -> None:
    """Jobs that ended, one in ten failed, and some minutes of GPU usage; by default long ago, one in a second."""
    kind = "sqlite" if Path(queue.place).exists() else "postgres"
    pieces = {
        "numbers": NUMBERS[kind],
        "id": ID[kind],
        "spec": SPEC,
        "shape": shape_of(JobSpec(command="")),
        "modulo": "%" if kind == "sqlite" else "%%",
        "began": repr(float(began)),
        "every": repr(float(every)),
    }
    driver = queue._driver

    def write() -> None:
        for sql in (JOBS, ATTEMPTS, FINDINGS, USAGE):
            text = sql.format(**pieces)
            driver.fetch_text(text, {"count": count} if "count" in text else {})

    driver.transaction(write)
    if kind == "postgres":
        driver.fetch_text("VACUUM ANALYZE stoker_jobs, stoker_attempts, stoker_attempt_details, stoker_usage", {})
    else:
        driver.fetch_text("ANALYZE", {})


WAITING = """
INSERT INTO stoker_jobs
  (id, name, state, priority, position, shape, blocked, not_before, spec, retries, retries_left, submitted)
{numbers}
SELECT '{prefix}' || {id}, '', 'queued', n {modulo} 3, {behind} + n,
  CASE WHEN n {modulo} 4 = 0 THEN '{other}' ELSE '{shape}' END,
  {blocked}, {not_before}, '{spec}', 0, 0, {began} + n
FROM numbers
"""


def write_waiting(
    queue: Store, count: int, *, blocked: int = 0, not_before: float = 0.0, began: float = 1000.0, behind: int = 0
) -> None:
    """Queued jobs of two shapes and three priorities, without any statistics of them; `behind` so many others."""
    kind = "sqlite" if Path(queue.place).exists() else "postgres"
    text = WAITING.format(
        numbers=NUMBERS[kind],
        id=ID[kind],
        prefix=f"w{blocked}{int(not_before > 0)}",
        modulo="%" if kind == "sqlite" else "%%",
        shape=shape_of(JobSpec(command="")),
        other=shape_of(JobSpec(command="", gpus=0)),
        blocked=blocked,
        not_before=not_before,
        began=repr(float(began)),
        behind=behind,
        spec=SPEC,
    )
    queue._driver.fetch_text(text, {"count": count})
