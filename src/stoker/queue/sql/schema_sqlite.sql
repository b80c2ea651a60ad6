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
  group_name TEXT NOT NULL DEFAULT '',
  state TEXT NOT NULL,
  priority INTEGER NOT NULL,
  position REAL NOT NULL,
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
  notify TEXT NOT NULL DEFAULT '',
  kept_by TEXT,
  kept_gpus TEXT,
  kept_until REAL,
  shape TEXT NOT NULL,
  blocked INTEGER NOT NULL DEFAULT 0,
  pattern TEXT NOT NULL DEFAULT '',
  spec TEXT NOT NULL
);
CREATE INDEX stoker_jobs_queued ON stoker_jobs (priority DESC, position, submitted, id) WHERE state = 'queued';
CREATE INDEX stoker_jobs_ready ON stoker_jobs (shape, priority DESC, position, submitted, id)
  WHERE state = 'queued' AND blocked = 0 AND not_before = 0 AND kept_by IS NULL;
CREATE INDEX stoker_jobs_later ON stoker_jobs (not_before) WHERE state = 'queued' AND not_before > 0;
CREATE INDEX stoker_jobs_submitted ON stoker_jobs (submitted, position);
CREATE INDEX stoker_jobs_state ON stoker_jobs (state, submitted, position);
CREATE INDEX stoker_jobs_name ON stoker_jobs (name) WHERE name <> '';

-- Jobs with entries of `--notify`; those for the end of a group are in the group.
CREATE INDEX stoker_jobs_notify ON stoker_jobs (ended) WHERE notify <> '';

CREATE INDEX stoker_jobs_group ON stoker_jobs (group_name, state) WHERE group_name <> '';

-- `key` is the end of the shapes of its jobs while `at_most` of them may run at once.
CREATE TABLE stoker_groups (
  name TEXT NOT NULL PRIMARY KEY,
  key TEXT NOT NULL UNIQUE,
  at_most INTEGER,
  notify TEXT NOT NULL DEFAULT '',
  submitted REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX stoker_groups_submitted ON stoker_groups (submitted);
CREATE INDEX stoker_groups_notify ON stoker_groups (name) WHERE notify <> '';

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

-- What jobs are searched by, and the index of its trigrams, which is told of every change.
CREATE TABLE stoker_texts (
  seq INTEGER PRIMARY KEY,
  job_id TEXT NOT NULL UNIQUE REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  name TEXT NOT NULL,
  command TEXT NOT NULL,
  marks TEXT NOT NULL,
  owner TEXT NOT NULL
);
CREATE VIRTUAL TABLE stoker_trigrams USING fts5 (
  name, command, marks, owner,
  content = 'stoker_texts', content_rowid = 'seq', tokenize = 'trigram', detail = none, columnsize = 0
);
CREATE TRIGGER stoker_texts_new AFTER INSERT ON stoker_texts
  BEGIN
    INSERT INTO stoker_trigrams (rowid, name, command, marks, owner)
    VALUES (NEW.seq, NEW.name, NEW.command, NEW.marks, NEW.owner);
  END;
CREATE TRIGGER stoker_texts_less AFTER DELETE ON stoker_texts
  BEGIN
    INSERT INTO stoker_trigrams (stoker_trigrams, rowid, name, command, marks, owner)
    VALUES ('delete', OLD.seq, OLD.name, OLD.command, OLD.marks, OLD.owner);
  END;
CREATE TRIGGER stoker_texts_changed AFTER UPDATE ON stoker_texts
  BEGIN
    INSERT INTO stoker_trigrams (stoker_trigrams, rowid, name, command, marks, owner)
    VALUES ('delete', OLD.seq, OLD.name, OLD.command, OLD.marks, OLD.owner);
    INSERT INTO stoker_trigrams (rowid, name, command, marks, owner)
    VALUES (NEW.seq, NEW.name, NEW.command, NEW.marks, NEW.owner);
  END;

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
  pending INTEGER NOT NULL DEFAULT 0,
  location TEXT NOT NULL DEFAULT '',
  UNIQUE (job_id, number)
);
CREATE INDEX stoker_attempts_running ON stoker_attempts (lease_expires) WHERE outcome IS NULL;
CREATE INDEX stoker_attempts_worker ON stoker_attempts (worker_id, started);
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

-- What similar jobs took.
CREATE INDEX stoker_jobs_pattern ON stoker_jobs (pattern, ended) WHERE state = 'succeeded' AND pattern <> '';
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
  power REAL,
  PRIMARY KEY (host, gpu, minute)
) WITHOUT ROWID;
CREATE INDEX stoker_usage_minute ON stoker_usage (minute);

CREATE TABLE stoker_notices (
  name TEXT NOT NULL PRIMARY KEY,
  sent REAL NOT NULL
) WITHOUT ROWID;

-- The URLs that were added on the page, each with the events that are sent to it.
CREATE TABLE stoker_notify_urls (
  id TEXT NOT NULL PRIMARY KEY,
  url TEXT NOT NULL UNIQUE,
  name TEXT NOT NULL,
  events TEXT NOT NULL,
  added REAL NOT NULL
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
CREATE INDEX stoker_jobs_kept_order ON stoker_jobs (priority DESC, position, submitted, id) WHERE kept_by IS NOT NULL;

-- Jobs that must start by a deadline, by the clock of leases, or that recur; until that is done with.
CREATE TABLE stoker_schedule (
  job_id TEXT NOT NULL PRIMARY KEY REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  deadline REAL,
  recurs INTEGER NOT NULL
);
CREATE INDEX stoker_schedule_deadline ON stoker_schedule (deadline) WHERE deadline IS NOT NULL;
CREATE INDEX stoker_schedule_recurs ON stoker_schedule (job_id) WHERE recurs = 1;

CREATE TABLE stoker_feeds (
  name TEXT NOT NULL PRIMARY KEY,
  version INTEGER NOT NULL,
  memory TEXT NOT NULL
);

CREATE TABLE stoker_blobs (
  digest TEXT NOT NULL PRIMARY KEY,
  size INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE stoker_blob_chunks (
  digest TEXT NOT NULL REFERENCES stoker_blobs (digest) ON DELETE CASCADE,
  number INTEGER NOT NULL,
  data BLOB NOT NULL,
  PRIMARY KEY (digest, number)
);

CREATE TABLE stoker_blob_uses (
  job_id TEXT NOT NULL REFERENCES stoker_jobs (id) ON DELETE CASCADE,
  digest TEXT NOT NULL REFERENCES stoker_blobs (digest),
  PRIMARY KEY (job_id, digest)
) WITHOUT ROWID;
CREATE INDEX stoker_blob_uses_digest ON stoker_blob_uses (digest);

-- `blocked` follows the states of the jobs that a job comes after.
CREATE TRIGGER stoker_jobs_block AFTER UPDATE OF state ON stoker_jobs
  WHEN OLD.state <> NEW.state AND (OLD.state IN {ended_states} OR NEW.state IN {ended_states})
  BEGIN
    UPDATE stoker_jobs SET blocked = CASE WHEN {fulfilled stoker_jobs} THEN 0 ELSE 1 END
    WHERE id IN (SELECT d.job_id FROM stoker_dependencies d WHERE d.needs = NEW.id);
  END;
CREATE TRIGGER stoker_dependencies_new AFTER INSERT ON stoker_dependencies
  BEGIN
    UPDATE stoker_jobs SET blocked = CASE WHEN {fulfilled stoker_jobs} THEN 0 ELSE 1 END WHERE id = NEW.job_id;
  END;
CREATE TRIGGER stoker_dependencies_less AFTER DELETE ON stoker_dependencies
  BEGIN
    UPDATE stoker_jobs SET blocked = CASE WHEN {fulfilled stoker_jobs} THEN 0 ELSE 1 END WHERE id = OLD.job_id;
  END;

-- No path into `running` exceeds the cap of a group: a claim that would finds no job.
CREATE TRIGGER stoker_jobs_cap BEFORE UPDATE OF state ON stoker_jobs
  WHEN NEW.state = 'running' AND OLD.state <> 'running' AND {full NEW.shape}
  BEGIN
    SELECT RAISE(IGNORE);
  END;
