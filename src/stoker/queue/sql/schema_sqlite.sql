-- The tables of a queue in SQLite. A change of them is a new `VERSION` in driver.py.

CREATE TABLE stoker_queue (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  version INTEGER NOT NULL,
  paused INTEGER NOT NULL,
  position REAL NOT NULL
);
INSERT INTO stoker_queue VALUES (1, 1, 0, 0);

CREATE TABLE stoker_jobs (
  id TEXT NOT NULL PRIMARY KEY,
  origin TEXT UNIQUE,
  name TEXT NOT NULL,
  state TEXT NOT NULL,
  priority INTEGER NOT NULL,
  position REAL NOT NULL,
  gpus INTEGER NOT NULL,
  retries INTEGER NOT NULL,
  retries_left INTEGER NOT NULL,
  attempts INTEGER NOT NULL DEFAULT 0,
  attempt TEXT,
  submitted REAL NOT NULL,
  started REAL,
  ended REAL,
  not_before REAL NOT NULL DEFAULT 0,
  cancel_requested REAL,
  exit_code INTEGER,
  reason TEXT NOT NULL DEFAULT '',
  link TEXT NOT NULL DEFAULT '',
  kept_by TEXT,
  kept_gpus TEXT,
  kept_until REAL,
  spec TEXT NOT NULL
);
CREATE INDEX stoker_jobs_queued ON stoker_jobs (priority DESC, position, submitted, id) WHERE state = 'queued';
CREATE INDEX stoker_jobs_later ON stoker_jobs (not_before) WHERE state = 'queued' AND not_before > 0;
CREATE INDEX stoker_jobs_submitted ON stoker_jobs (submitted, position);
CREATE INDEX stoker_jobs_state ON stoker_jobs (state, submitted, position);
CREATE INDEX stoker_jobs_name ON stoker_jobs (name) WHERE name <> '';

CREATE TABLE stoker_dependencies (
  job_id TEXT NOT NULL REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  needs TEXT NOT NULL REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  kind TEXT NOT NULL,
  PRIMARY KEY (job_id, needs, kind)
) WITHOUT ROWID;
CREATE INDEX stoker_dependencies_needs ON stoker_dependencies (needs);

CREATE TABLE stoker_tags (
  tag TEXT NOT NULL,
  job_id TEXT NOT NULL REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  PRIMARY KEY (tag, job_id)
) WITHOUT ROWID;
CREATE INDEX stoker_tags_job ON stoker_tags (job_id);

CREATE TABLE stoker_attempts (
  id TEXT NOT NULL PRIMARY KEY,
  job_id TEXT NOT NULL REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  worker_id TEXT NOT NULL,
  number INTEGER NOT NULL,
  gpus TEXT NOT NULL,
  started REAL NOT NULL,
  lease_expires REAL NOT NULL,
  ended REAL,
  outcome TEXT,
  exit_code INTEGER,
  reason TEXT NOT NULL DEFAULT '',
  UNIQUE (job_id, number)
);
CREATE INDEX stoker_attempts_running ON stoker_attempts (lease_expires) WHERE outcome IS NULL;
CREATE UNIQUE INDEX stoker_attempts_one ON stoker_attempts (job_id) WHERE outcome IS NULL;

CREATE TABLE stoker_logs (
  attempt_id TEXT NOT NULL PRIMARY KEY REFERENCES stoker_attempts (id) ON DELETE CASCADE,
  tail TEXT NOT NULL,
  is_last INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE stoker_workers (
  id TEXT NOT NULL PRIMARY KEY,
  host TEXT NOT NULL,
  view TEXT NOT NULL,
  started REAL NOT NULL,
  seen REAL NOT NULL,
  paused INTEGER NOT NULL
);

CREATE TABLE stoker_forgotten (
  origin TEXT NOT NULL PRIMARY KEY,
  job_id TEXT NOT NULL
) WITHOUT ROWID;

CREATE INDEX stoker_jobs_ended ON stoker_jobs (ended, state) WHERE ended IS NOT NULL;

CREATE TABLE stoker_attempt_details (
  attempt_id TEXT NOT NULL PRIMARY KEY REFERENCES stoker_attempts (id) ON DELETE CASCADE,
  cause TEXT NOT NULL,
  rule TEXT NOT NULL,
  report TEXT NOT NULL,
  fit TEXT NOT NULL,
  written REAL NOT NULL
);
CREATE INDEX stoker_attempt_details_rule ON stoker_attempt_details (written) WHERE rule <> '';

CREATE TABLE stoker_snoozes (
  attempt_id TEXT NOT NULL PRIMARY KEY REFERENCES stoker_attempts (id) ON DELETE CASCADE,
  until REAL NOT NULL,
  who TEXT NOT NULL
);
CREATE INDEX stoker_snoozes_until ON stoker_snoozes (until);

CREATE TABLE stoker_usage (
  host TEXT NOT NULL,
  gpu TEXT NOT NULL,
  minute INTEGER NOT NULL,
  job REAL NOT NULL,
  background REAL NOT NULL,
  somebody REAL NOT NULL,
  free REAL NOT NULL,
  unknown REAL NOT NULL,
  utilization REAL,
  memory INTEGER,
  PRIMARY KEY (host, gpu, minute)
) WITHOUT ROWID;
CREATE INDEX stoker_usage_minute ON stoker_usage (minute);

CREATE TABLE stoker_notices (
  name TEXT NOT NULL PRIMARY KEY,
  sent REAL NOT NULL
) WITHOUT ROWID;

CREATE TABLE stoker_log_streams (
  attempt_id TEXT NOT NULL PRIMARY KEY REFERENCES stoker_attempts (id) ON DELETE CASCADE,
  until REAL NOT NULL,
  edition TEXT NOT NULL DEFAULT '',
  size INTEGER NOT NULL DEFAULT 0,
  unfinished BLOB,
  behind INTEGER NOT NULL DEFAULT 0,
  complete INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE stoker_log_chunks (
  attempt_id TEXT NOT NULL REFERENCES stoker_log_streams (attempt_id) ON DELETE CASCADE,
  edition TEXT NOT NULL,
  start INTEGER NOT NULL,
  data BLOB NOT NULL,
  PRIMARY KEY (attempt_id, edition, start)
);

CREATE TABLE stoker_clocks (
  boot TEXT NOT NULL PRIMARY KEY,
  ahead REAL NOT NULL
) WITHOUT ROWID;

CREATE INDEX stoker_jobs_kept ON stoker_jobs (kept_by) WHERE kept_by IS NOT NULL;

CREATE TABLE stoker_feeds (
  name TEXT NOT NULL PRIMARY KEY,
  version INTEGER NOT NULL,
  memory TEXT NOT NULL
);
