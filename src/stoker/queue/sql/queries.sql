Every statement of the queue, by name. The pieces in braces are written out for each database:
{now} is the database's clock in seconds since the epoch, {lease_now} the clock of leases and retries (in SQLite it cannot be
set), {shown_lease} and {shown_wake} are their times by {now}. {among x}: in the JSON array :x. {locked x} and {skip_locked x}
lock rows where the database can; a transaction of SQLite locks everything. {claimed x} is a whole claim, in one round trip
where that matters. {queued}, {ready x}, {unended x} and the names of indexes ({by_queued}, {by_ready}, {by_kept}, {by_later}, {by_lease}, {by_ended}) make each
planner walk the index that was made for a statement and stop early, also without statistics; so does CASE, which no index has.
SQLite reads the tables of a CROSS JOIN in their order.

A ready job is queued, not blocked by a job that it comes after, does not wait for a retry, and no machine reserves GPUs for it:
all of that is in one index, by shape. So no statement walks along jobs that cannot start. A retry that is due becomes ready by
`wake`. Those for which a machine reserves GPUs are few, and have an index of their own. While a group has a cap, its key is the
end of the shapes of its jobs: those of a full group are left out by one look for each shape.

-- job --
j.id, j.spec, j.priority, j.state, j.position, j.submitted, j.started, j.ended, {shown_wake}, j.retries_left,
j.attempts, j.attempt, j.exit_code, j.reason, j.link, j.cancel_requested, j.origin, {cap} AS at_most,
j.notify, {notify_of_group}, {kept}

-- cap --
CASE WHEN j.group_name <> '' THEN (SELECT g.at_most FROM stoker_groups g WHERE g.name = j.group_name) END

-- notify_of_group --
CASE WHEN j.group_name <> '' THEN (SELECT g.notify FROM stoker_groups g WHERE g.name = j.group_name) ELSE '' END

-- running_in_group --
(SELECT count(*) FROM stoker_jobs r WHERE r.group_name = g.name AND r.group_name <> '' AND r.state = 'running')

-- full --
(length($) > 16 AND EXISTS (SELECT 1 FROM stoker_groups g WHERE g.key = substr($, 18) AND g.at_most <= {running_in_group}))

-- shape_in_group --
CAST(:shape AS TEXT) || coalesce((SELECT '+' || g.key FROM stoker_groups g WHERE g.name = :group AND g.at_most IS NOT NULL), '')

-- kept --
CASE WHEN j.kept_by IS NULL THEN NULL WHEN {there kept_by} THEN
  '["' || j.kept_by || '",' || j.kept_gpus || ',' || coalesce(CAST(j.kept_until AS TEXT), 'null') || ']' END

-- there --
(coalesce((SELECT w.seen FROM stoker_workers w WHERE w.id = $), 0) >= {now} - 60)

-- unkept --
kept_by = NULL, kept_gpus = NULL, kept_until = NULL

-- ended_states --
('succeeded', 'failed', 'cancelled')

-- fulfilled --
NOT EXISTS (
    SELECT 1 FROM stoker_dependencies d JOIN stoker_jobs n ON n.id = d.needs
    WHERE d.job_id = $.id
      AND NOT (n.state = 'succeeded' OR (d.kind = 'any' AND n.state IN ('failed', 'cancelled')))
  )

-- open --
NOT EXISTS (SELECT 1 FROM stoker_queue WHERE paused = 1)
    AND NOT EXISTS (SELECT 1 FROM stoker_workers WHERE id = :worker AND paused = 1)

-- taken ids --
SELECT id FROM stoker_jobs WHERE id {among ids}

-- taken origins --
SELECT origin, id FROM stoker_jobs WHERE origin {among origins}
UNION ALL
SELECT origin, job_id FROM stoker_forgotten WHERE origin {among origins}

-- insert job --
INSERT INTO stoker_jobs
  (id, origin, name, group_name, notify, state, priority, position, shape, pattern, spec, retries, retries_left, submitted, not_before)
VALUES
  (:id, :origin, :name, :group, :notify, :state, :priority, :position, {shape_in_group}, :pattern, :spec, :retries, :retries, {now}, {waits_until_begin})

-- waits_until_begin --
CASE WHEN :begin > {now} THEN {lease_now} + (:begin - {now}) ELSE 0 END

-- insert schedule --
INSERT INTO stoker_schedule (job_id, deadline, recurs)
VALUES (:job, CASE WHEN :deadline > 0 THEN {lease_now} + (:deadline - {now}) END, :recurs)
ON CONFLICT (job_id) DO NOTHING

-- delete schedule --
DELETE FROM stoker_schedule WHERE job_id = :job

-- end recurrences --
DELETE FROM stoker_schedule WHERE job_id {among ids}

-- is_anything_scheduled --
(EXISTS (
  SELECT 1 FROM stoker_schedule s CROSS JOIN stoker_jobs j
  WHERE s.deadline IS NOT NULL AND s.deadline <= {lease_now} AND j.id = s.job_id AND j.state <> 'running'
) OR EXISTS (
  SELECT 1 FROM stoker_schedule s CROSS JOIN stoker_jobs j
  WHERE s.recurs = 1 AND j.id = s.job_id AND j.state IN {ended_states}
))

-- past deadlines --
SELECT s.job_id FROM stoker_schedule s CROSS JOIN stoker_jobs j
WHERE s.deadline IS NOT NULL AND s.deadline <= {lease_now} AND j.id = s.job_id AND j.state <> 'running'
ORDER BY s.job_id LIMIT 100
{skip_locked s}

-- recurring jobs --
SELECT s.job_id FROM stoker_schedule s CROSS JOIN stoker_jobs j
WHERE s.recurs = 1 AND j.id = s.job_id AND j.state IN {ended_states}
ORDER BY s.job_id LIMIT 100
{skip_locked s}

-- expire --
UPDATE stoker_jobs SET state = 'failed', reason = :reason, ended = {now}, exit_code = NULL, not_before = 0, {unkept}
WHERE id = :job AND state IN ('queued', 'held') RETURNING id

-- insert dependency --
INSERT INTO stoker_dependencies (job_id, needs, kind) VALUES (:job, :needs, :kind)

-- insert tag --
INSERT INTO stoker_tags (tag, job_id) VALUES (:tag, :job)

-- delete dependencies --
DELETE FROM stoker_dependencies WHERE job_id = :job

-- delete tags --
DELETE FROM stoker_tags WHERE job_id = :job

-- needed by needs --
WITH RECURSIVE chain (id) AS (
  SELECT needs FROM stoker_dependencies WHERE job_id {among needs}
  UNION
  SELECT d.needs FROM stoker_dependencies d JOIN chain ON d.job_id = chain.id
)
SELECT id FROM chain WHERE id = :job

-- in_order --
ORDER BY j.priority DESC, j.position, j.submitted, j.id

-- next_shape --
SELECT j.shape FROM stoker_jobs j {by_ready} WHERE {ready j} AND j.shape > $ ORDER BY j.shape LIMIT 1

-- heads --
WITH RECURSIVE found (shape, number) AS (
  SELECT ({next_shape :after}), 1
  UNION ALL
  SELECT ({next_shape found.shape}), found.number + CASE WHEN {full found.shape} THEN 0 ELSE 1 END FROM found
  WHERE found.shape IS NOT NULL AND found.number < :shapes
), named (shape) AS (
  SELECT {each also}
), wanted (shape) AS (
  SELECT shape FROM found WHERE shape IS NOT NULL AND NOT (shape {among without}) AND NOT {full found.shape}
  UNION
  SELECT shape FROM named WHERE NOT {full named.shape}
)
SELECT j.shape, j.id, j.priority, j.position, j.submitted, NULL AS kept FROM {heads_of wanted} WHERE {open}
UNION ALL
SELECT * FROM (
  SELECT j.shape, j.id, j.priority, j.position, j.submitted, {kept} AS kept FROM stoker_jobs j {by_kept}
  WHERE j.kept_by IS NOT NULL AND {startable} AND NOT {full j.shape} AND {open}
  {in_order} LIMIT 50
) AS reserved
UNION ALL
SELECT j.shape, j.id, j.priority, j.position, j.submitted, {kept} FROM stoker_jobs j
WHERE j.kept_by = :worker AND {startable} AND NOT {full j.shape} AND {open}
UNION ALL
SELECT NULL, CASE WHEN {is_anything_expired} OR {is_anything_scheduled} THEN 'expired' END, 0, {next_wake}, {lease_now}, CAST({now} AS TEXT)

-- startable --
CASE WHEN j.state = 'queued' AND j.blocked = 0 AND j.not_before = 0 THEN {yes} ELSE {no} END

-- first ready --
SELECT shape, id, priority, position, submitted, NULL FROM (
  SELECT * FROM stoker_jobs j {by_queued} WHERE {queued} {in_order} LIMIT 100
) AS line WHERE {ready line} AND NOT {full line.shape} AND {open}

-- rooms --
SELECT g.key, g.at_most - {running_in_group} FROM stoker_groups g WHERE g.key {among keys} AND g.at_most IS NOT NULL

-- specs --
SELECT shape, spec FROM stoker_jobs WHERE id {among jobs}

-- next_wake --
(SELECT not_before FROM stoker_jobs {by_later} WHERE state = 'queued' AND not_before > 0 ORDER BY not_before LIMIT 1)

-- wake --
UPDATE stoker_jobs {by_later} SET not_before = 0 WHERE state = 'queued' AND not_before > 0 AND not_before <= {lease_now}
RETURNING shape, priority

-- any_job --
SELECT j.id FROM stoker_jobs j
  WHERE j.id {among jobs} AND CASE WHEN j.state = 'queued' AND j.blocked = 0 AND j.not_before <= {lease_now} THEN {yes} ELSE {no} END
    AND NOT {full j.shape} AND {open}
  {in_order}
  LIMIT 1
  {skip_locked j}

-- head --
SELECT head.id FROM (
    SELECT j.id, j.priority, j.position FROM stoker_jobs j {by_ready}
    WHERE {ready j} AND j.shape = :shape AND NOT (j.id {among others}) AND {open}
    {in_order}
    LIMIT 1
    {skip_locked j}
  ) AS head
  WHERE head.priority > :priority OR (head.priority = :priority AND head.position < :position)

-- claim --
{claimed any_job}

-- claim head --
{claimed head}

-- start --
UPDATE stoker_jobs
SET state = 'running', attempt = :attempt, attempts = attempts + 1, started = CASE WHEN :pending = 1 THEN NULL ELSE {now} END,
    ended = NULL, exit_code = NULL, reason = '', {unkept}

-- attempt_columns --
(id, job_id, worker_id, number, gpus, started, lease_expires, pending)

-- has_no_outcome --
CASE WHEN outcome IS NULL THEN {yes} ELSE {no} END

-- is_running --
CASE WHEN state = 'running' THEN {yes} ELSE {no} END

-- is_anything_expired --
(SELECT 1 FROM stoker_attempts a {by_lease}
 WHERE {unended a} AND a.lease_expires < {lease_now} AND a.worker_id <> :worker ORDER BY a.lease_expires LIMIT 1) IS NOT NULL

-- is anything expired --
SELECT {lease_now}, {is_anything_expired} OR {is_anything_scheduled}, {next_wake}

-- expired attempts --
SELECT a.id FROM stoker_attempts a {by_lease}
WHERE {unended a} AND a.lease_expires < {lease_now} AND a.worker_id <> :worker
ORDER BY a.lease_expires, a.id
LIMIT 100
{skip_locked a}

-- forgive step --
UPDATE stoker_attempts SET lease_expires = lease_expires + :step
WHERE outcome IS NULL AND lease_expires BETWEEN {lease_now} - :step AND {lease_now} + :step

-- renew --
UPDATE stoker_attempts SET lease_expires = {lease_now} + :lease
WHERE id {among attempts} AND {has_no_outcome}
RETURNING id, (SELECT j.cancel_requested IS NOT NULL FROM stoker_jobs j WHERE j.id = job_id)

-- adopt --
UPDATE stoker_attempts SET worker_id = :worker, lease_expires = {lease_now} + :lease
WHERE id {among attempts} AND {has_no_outcome}
RETURNING id

-- end attempt --
UPDATE stoker_attempts
SET outcome = :outcome, exit_code = :exit_code, reason = :reason, ended = {now}
WHERE id = :attempt AND {has_no_outcome}
RETURNING job_id

-- success_of_attempt --
UPDATE stoker_attempts
SET outcome = 'succeeded', exit_code = :exit_code, reason = :reason, ended = {now}
WHERE id = :ended AND {has_no_outcome}

-- success_of_job --
UPDATE stoker_jobs
SET state = 'succeeded', exit_code = :exit_code, reason = :reason, ended = {now}, not_before = 0, cancel_requested = NULL

-- job of attempt --
SELECT {job} FROM stoker_jobs j WHERE j.id = :job AND j.attempt = :attempt AND {is_running} {locked j}

-- ended so --
SELECT count(*) FROM stoker_attempts WHERE job_id = :job AND outcome = :outcome

-- freed --
SELECT j.shape, max(j.priority), count(*) FROM stoker_dependencies d CROSS JOIN stoker_jobs j
WHERE d.needs = :job AND j.id = d.job_id AND {startable}
GROUP BY j.shape
UNION ALL
SELECT j.shape, j.priority, 1 FROM stoker_jobs j WHERE j.id = :job AND length(j.shape) > 16

-- end job --
UPDATE stoker_jobs
SET state = :state, reason = :reason, retries_left = :retries_left, not_before = CASE WHEN :delay > 0 THEN {lease_now} + :delay ELSE 0 END,
    exit_code = :exit_code, cancel_requested = NULL,
    ended = CASE WHEN :state IN ('succeeded', 'failed', 'cancelled') THEN {now} ELSE NULL END
WHERE id = :job AND attempt = :attempt AND {is_running}
RETURNING shape, priority

-- reject --
UPDATE stoker_jobs SET state = 'failed', reason = :reason, exit_code = 125, ended = {now}, not_before = 0, {unkept}
WHERE id = :job AND state = 'queued'
RETURNING id

-- cancel --
UPDATE stoker_jobs
SET state = CASE WHEN state = 'running' THEN 'running' ELSE 'cancelled' END,
    reason = CASE WHEN state = 'running' THEN reason ELSE 'cancelled before it started' END,
    ended = CASE WHEN state = 'running' THEN ended ELSE {now} END,
    cancel_requested = CASE WHEN state = 'running' THEN coalesce(cancel_requested, {now}) ELSE NULL END, {unkept}
WHERE id {among ids} AND state IN ('queued', 'held', 'running')
RETURNING id, state, coalesce((SELECT a.worker_id FROM stoker_attempts a WHERE a.id = attempt), '')

-- annotate attempt --
UPDATE stoker_attempts
SET pending = :pending, location = :location, started = CASE WHEN :began <= started THEN started WHEN :began < {now} THEN :began ELSE {now} END
WHERE id = :attempt AND {has_no_outcome}

-- annotate job --
UPDATE stoker_jobs
SET started = CASE WHEN :pending = 0 THEN (SELECT a.started FROM stoker_attempts a WHERE a.id = :attempt) END
WHERE id = (SELECT a.job_id FROM stoker_attempts a WHERE a.id = :attempt) AND attempt = :attempt AND {is_running}

-- requests --
SELECT a.id, CASE WHEN j.cancel_requested IS NULL THEN 0 ELSE 1 END,
  CASE WHEN s.until > {now} THEN s.until - {now} WHEN s.until = 0 THEN 0 END, s.until, s.who
FROM stoker_attempts a JOIN stoker_jobs j ON j.attempt = a.id AND j.id = a.job_id
  LEFT JOIN stoker_snoozes s ON s.attempt_id = a.id
WHERE a.id {among attempts} AND {has_no_outcome} AND {is_running}
  AND (j.cancel_requested IS NOT NULL OR s.until > {now} OR s.until = 0)

-- snooze --
INSERT INTO stoker_snoozes (attempt_id, until, who)
SELECT a.id, CASE WHEN :seconds > 0 THEN {now} + :seconds ELSE 0 END, :who FROM stoker_attempts a WHERE a.id = :attempt AND a.outcome IS NULL
ON CONFLICT (attempt_id) DO UPDATE SET until = excluded.until, who = excluded.who
RETURNING (SELECT a.worker_id FROM stoker_attempts a WHERE a.id = attempt_id)

-- snoozes --
SELECT s.attempt_id, s.until FROM stoker_snoozes s JOIN stoker_attempts a ON a.id = s.attempt_id
WHERE s.until > {now} AND a.outcome IS NULL

-- hold --
UPDATE stoker_jobs SET state = 'held', reason = 'held', {unkept} WHERE id {among ids} AND state = 'queued' RETURNING id

-- release --
UPDATE stoker_jobs SET state = 'queued', reason = '' WHERE id {among ids} AND state = 'held' RETURNING id

-- retry --
UPDATE stoker_jobs
SET state = 'queued', reason = '', retries_left = retries, not_before = 0, ended = NULL, exit_code = NULL, link = ''
WHERE id {among ids} AND (state IN ('succeeded', 'failed', 'cancelled') OR (state = 'queued' AND not_before > {lease_now}))
RETURNING id

-- reinstate --
UPDATE stoker_jobs SET state = 'held', reason = 'held', ended = NULL
WHERE id {among ids} AND state = 'cancelled' RETURNING id

-- edit --
UPDATE stoker_jobs
SET name = :name, group_name = :group, notify = :notify, priority = :priority, shape = {shape_in_group}, pattern = :pattern, spec = :spec, retries = :retries,
    retries_left = :retries_left, not_before = CASE WHEN :begins = 1 THEN {waits_until_begin} ELSE not_before END, {unkept}
WHERE id = :id

-- keep --
UPDATE stoker_jobs SET kept_by = :worker, kept_gpus = :gpus, kept_until = CASE WHEN :seconds >= 0 THEN {now} + :seconds END
WHERE id = (SELECT j.id FROM stoker_jobs j WHERE j.id = :job {skip_locked j})
  AND CASE WHEN state = 'queued' THEN {yes} ELSE {no} END AND (
    kept_by IS NULL OR kept_by = :worker OR kept_by = :instead_of OR NOT {there kept_by}
  )
RETURNING id, {rung}

-- keep no more --
UPDATE stoker_jobs SET {unkept} WHERE kept_by = :worker AND NOT (id {among jobs}) RETURNING id

-- keep for the dead no more --
UPDATE stoker_jobs SET {unkept} WHERE kept_by IS NOT NULL AND NOT {there kept_by} RETURNING shape

-- durations --
WITH wanted (pattern) AS (SELECT {each patterns})
SELECT w.pattern, ended_alike.seconds FROM {newest_alike wanted}

-- lock queue --
SELECT paused FROM stoker_queue q {locked q}

-- waiting jobs --
SELECT id, priority, position FROM stoker_jobs
WHERE state IN ('queued', 'held') ORDER BY priority DESC, position, submitted, id

-- set position --
UPDATE stoker_jobs SET position = :position WHERE id = :id

-- set spec --
UPDATE stoker_jobs SET spec = :spec WHERE id = :id

-- set notify --
UPDATE stoker_jobs SET notify = :notify WHERE id = :id

-- set place --
UPDATE stoker_jobs SET position = :position, priority = :priority WHERE id = :id

-- one job --
SELECT {job} FROM stoker_jobs j WHERE j.id = :id

-- jobs to change --
SELECT {job} FROM stoker_jobs j WHERE j.id {among ids} ORDER BY j.id {locked j}

-- jobs by name --
SELECT {job} FROM stoker_jobs j WHERE j.name = :name AND j.name <> '' ORDER BY j.submitted DESC, j.id LIMIT 5

-- jobs of group --
SELECT {job} FROM stoker_jobs j WHERE j.group_name = :group AND j.group_name <> '' ORDER BY j.submitted, j.position, j.id

-- begin group --
INSERT INTO stoker_groups (name, key, submitted) VALUES (:group, :key, {now})

-- join group --
INSERT INTO stoker_groups (name, key, submitted) VALUES (:group, :key, {now})
ON CONFLICT (name) DO UPDATE SET submitted = excluded.submitted

-- group names --
SELECT name FROM stoker_groups WHERE name = :name OR (name >= :begin AND name < :beyond)

-- groups --
SELECT g.name, g.at_most, g.submitted, g.notify FROM stoker_groups g

-- groups_named --
WHERE g.name {among names}

-- groups_newest --
ORDER BY g.submitted DESC, g.name

-- group counts --
SELECT j.group_name, j.state, count(*) FROM stoker_jobs j WHERE j.group_name {among names} AND j.group_name <> ''
GROUP BY j.group_name, j.state

-- running groups --
SELECT g.name, g.at_most, count(*) FROM stoker_jobs j JOIN stoker_groups g ON g.name = j.group_name
WHERE j.state = 'running' AND j.group_name <> '' AND g.at_most IS NOT NULL GROUP BY g.name, g.at_most

-- cap of group --
SELECT g.at_most FROM stoker_groups g WHERE g.name = :group {locked g}

-- notify of group --
SELECT g.notify FROM stoker_groups g WHERE g.name = :group {locked g}

-- set notify of group --
UPDATE stoker_groups SET notify = :notify WHERE name = :group

-- groups done since --
SELECT j.group_name, max(j.ended) FROM stoker_jobs j {by_ended} WHERE j.ended >= :at AND j.group_name <> ''
  AND NOT EXISTS (
    SELECT 1 FROM stoker_jobs u
    WHERE u.group_name = j.group_name AND u.group_name <> '' AND u.state IN ('queued', 'held', 'running')
  )
GROUP BY j.group_name

-- set cap --
UPDATE stoker_groups SET at_most = :at_most WHERE name = :group

-- set shapes --
UPDATE stoker_jobs SET shape = {shape_now} WHERE group_name = :group AND group_name <> '' AND shape <> {shape_now}

-- shape_now --
substr(shape, 1, 16) || coalesce((SELECT '+' || g.key FROM stoker_groups g WHERE g.name = stoker_jobs.group_name AND g.at_most IS NOT NULL), '')

-- clean groups --
DELETE FROM stoker_groups WHERE NOT EXISTS (
  SELECT 1 FROM stoker_jobs j WHERE j.group_name = stoker_groups.name AND j.group_name <> ''
) AND submitted < {now} - 60

-- jobs by prefix --
SELECT {job} FROM stoker_jobs j WHERE j.id >= :prefix AND j.id < :beyond ORDER BY j.id LIMIT 5

-- all jobs --
SELECT {job} FROM stoker_jobs j

-- tagged jobs --
SELECT {job} FROM (
  SELECT * FROM stoker_jobs WHERE id IN (SELECT t.job_id FROM stoker_tags t WHERE t.tag = :tag) LIMIT 2147483647
) j

-- newest first --
ORDER BY j.submitted DESC, j.position DESC LIMIT :limit OFFSET :offset

-- begun first --
ORDER BY CASE WHEN j.started IS NULL THEN 1 ELSE 0 END, j.submitted DESC, j.position DESC LIMIT :limit OFFSET :offset

-- in order --
{in_order} LIMIT :limit OFFSET :offset

-- last submitted --
:submitted

-- last position --
:tie

-- last seq --
CAST(:tie AS BIGINT)

-- last place --
SELECT p.position FROM stoker_texts s JOIN stoker_jobs p ON p.id = s.job_id WHERE s.seq = CAST(:tie AS BIGINT)

-- last sorted --
:sorted

-- last id --
:id

-- with any --
({place_in}(t.name, :term) > 0 OR {place_in}(t.command, :term) > 0 OR {place_in}(t.marks, :term) > 0)

-- with name --
{place_in}(t.name, :term) > 0

-- with command --
{place_in}(t.command, :term) > 0

-- with tag --
{place_in}(t.marks, :term) > 0

-- with group --
{place_in}(t.marks, :term) > 0

-- with parameter --
{place_in}(t.marks, :term) > 0

-- with user --
{place_in}(t.owner, :term) > 0

-- with machine --
EXISTS (SELECT 1 FROM stoker_attempts a WHERE a.id = j.attempt AND a.worker_id {among term})

-- ran on machine --
SELECT DISTINCT a.job_id AS id FROM stoker_attempts a WHERE a.worker_id {among term}

-- hosts --
SELECT id, host FROM stoker_workers

-- id begins --
substr(j.id, 1, length(CAST(:term AS TEXT))) = :term

-- came --
CASE WHEN j.ended IS NOT NULL THEN j.ended WHEN j.state = 'running' THEN coalesce(j.started, j.submitted) ELSE j.submitted END

-- since ago --
{came} >= {now} - :term

-- since at --
{came} >= :term

-- submitted before ago --
j.submitted < {now} - :term

-- submitted before at --
j.submitted < :term

-- before ago --
j.submitted < {now} - :term AND {came} < {now} - :term

-- before at --
j.submitted < :term AND {came} < :term

-- ended since ago --
SELECT c.id FROM stoker_jobs c WHERE c.ended >= {now} - :term

-- ended since at --
SELECT c.id FROM stoker_jobs c WHERE c.ended >= :term

-- submitted since ago --
SELECT c.id FROM stoker_jobs c WHERE c.submitted >= {now} - :term

-- submitted since at --
SELECT c.id FROM stoker_jobs c WHERE c.submitted >= :term

-- running now --
SELECT c.id FROM stoker_jobs c WHERE c.state = 'running'

-- sort by state --
CASE j.state WHEN 'running' THEN 1 WHEN 'queued' THEN 2 WHEN 'held' THEN 3 WHEN 'failed' THEN 4 WHEN 'cancelled' THEN 5 ELSE 6 END

-- sort by when --
{came}

-- sort by priority --
j.priority

-- sort by lasted --
CASE WHEN j.started IS NULL OR j.state IN ('queued', 'held') THEN -1 ELSE coalesce(j.ended, {now}) - j.started END

-- id of job --
j.id

-- chosen jobs --
j.id {among ids}

-- ended since --
SELECT {job} FROM stoker_jobs j WHERE j.ended >= :at ORDER BY j.ended DESC

-- to notify since --
SELECT {job} FROM stoker_jobs j WHERE j.ended >= :at AND j.notify <> '' ORDER BY j.ended DESC

-- is anyone to notify --
SELECT EXISTS (SELECT 1 FROM stoker_notify_urls) OR EXISTS (SELECT 1 FROM stoker_jobs WHERE notify <> '')
  OR EXISTS (SELECT 1 FROM stoker_groups WHERE notify <> '')

-- notify urls --
SELECT id, url, name, events, added FROM stoker_notify_urls ORDER BY added, id

-- add notify url --
INSERT INTO stoker_notify_urls (id, url, name, events, added) VALUES (:id, :url, :name, :events, {now})
ON CONFLICT DO NOTHING RETURNING id

-- set notify events --
UPDATE stoker_notify_urls SET events = :events WHERE id = :id RETURNING id

-- remove notify url --
DELETE FROM stoker_notify_urls WHERE id = :id RETURNING id

-- counts --
SELECT state, count(*) FROM stoker_jobs GROUP BY state

-- unfinished counts --
SELECT state, count(*) FROM stoker_jobs WHERE state IN ('held', 'running') GROUP BY state
UNION ALL
SELECT 'queued', count(*) FROM (SELECT 1 AS one FROM stoker_jobs j {by_queued} WHERE {queued} {in_order} LIMIT 1000) AS counted

-- in line --
SELECT {job} FROM stoker_jobs j {by_queued} WHERE {queued} {in_order}

-- ids in line --
SELECT j.id FROM stoker_jobs j {by_queued} WHERE {queued} {in_order}

-- neighbours --
SELECT (
  SELECT id FROM (
    SELECT * FROM (
      SELECT j.id, j.position, j.submitted FROM stoker_jobs j {by_queued}
      WHERE {queued} AND j.priority = :priority AND (j.position, j.submitted, j.id) < (:position, :submitted, :id)
      ORDER BY j.position DESC, j.submitted DESC, j.id DESC LIMIT 1
    ) AS queued
    UNION ALL
    SELECT j.id, j.position, j.submitted FROM stoker_jobs j
    WHERE j.state = 'held' AND j.priority = :priority AND (j.position, j.submitted, j.id) < (:position, :submitted, :id)
  ) AS before ORDER BY position DESC, submitted DESC, id DESC LIMIT 1
), (
  SELECT id FROM (
    SELECT * FROM (
      SELECT j.id, j.position, j.submitted FROM stoker_jobs j {by_queued}
      WHERE {queued} AND j.priority = :priority AND (j.position, j.submitted, j.id) > (:position, :submitted, :id)
      ORDER BY j.position, j.submitted, j.id LIMIT 1
    ) AS queued
    UNION ALL
    SELECT j.id, j.position, j.submitted FROM stoker_jobs j
    WHERE j.state = 'held' AND j.priority = :priority AND (j.position, j.submitted, j.id) > (:position, :submitted, :id)
  ) AS behind ORDER BY position, submitted, id LIMIT 1
)

-- failed since --
SELECT {job} FROM stoker_jobs j WHERE j.ended >= :at AND j.state = 'failed' ORDER BY j.ended DESC

-- unseen_failures --
stoker_jobs j {by_ended}
WHERE j.ended > :at AND j.ended > coalesce((SELECT sent FROM stoker_notices WHERE name = :seen), 0) AND j.state = 'failed'
  AND CASE WHEN EXISTS (SELECT 1 FROM stoker_attempt_details f WHERE f.attempt_id = j.attempt AND f.rule <> '') THEN 1 ELSE 0 END = :by_rule

-- unseen failures --
SELECT {job} FROM {unseen_failures} ORDER BY j.ended DESC

-- count unseen failures --
SELECT count(*) FROM {unseen_failures}

-- seen failures --
SELECT sent FROM stoker_notices WHERE name = :seen

-- see failures --
INSERT INTO stoker_notices (name, sent) VALUES (:seen, :until)
ON CONFLICT (name) DO UPDATE SET sent = excluded.sent

-- unfulfilled needs --
WITH RECURSIVE chain (id) AS (
  SELECT job_id FROM stoker_dependencies WHERE job_id {among jobs}
  UNION
  SELECT n.id FROM chain JOIN stoker_dependencies d ON d.job_id = chain.id JOIN stoker_jobs n ON n.id = d.needs
  WHERE n.state IN ('queued', 'held')
)
SELECT d.job_id, n.id, n.state
FROM chain JOIN stoker_dependencies d ON d.job_id = chain.id JOIN stoker_jobs n ON n.id = d.needs
WHERE NOT (n.state = 'succeeded' OR (d.kind = 'any' AND n.state IN ('failed', 'cancelled')))
ORDER BY d.job_id, n.id

-- names --
SELECT id, name FROM stoker_jobs WHERE id {among ids} AND name <> ''

-- forgettable --
j.state {among states} AND j.ended < {now} - :age AND NOT EXISTS (SELECT 1 FROM stoker_schedule s WHERE s.job_id = j.id AND s.recurs = 1)
  AND NOT EXISTS (
    SELECT 1 FROM stoker_dependencies d JOIN stoker_jobs w ON w.id = d.job_id
    WHERE d.needs = j.id AND w.state IN ('queued', 'held', 'running')
  )

-- count forgettable --
SELECT count(*) FROM stoker_jobs j WHERE {forgettable}

-- clean --
DELETE FROM stoker_jobs WHERE id IN (
  SELECT j.id FROM stoker_jobs j WHERE {forgettable} LIMIT 1000
)
RETURNING id, origin

-- clean workers --
DELETE FROM stoker_workers
WHERE seen < {now} - :age
  AND NOT EXISTS (SELECT 1 FROM stoker_attempts a WHERE a.worker_id = stoker_workers.id AND a.outcome IS NULL)

-- attempt_row --
id, job_id, worker_id, number, gpus, started, {shown_lease}, ended, outcome, exit_code, reason, pending, location

-- attempts of job --
SELECT {attempt_row}
FROM stoker_attempts WHERE job_id = :job ORDER BY number

-- attempt --
SELECT {attempt_row}
FROM stoker_attempts WHERE id = :attempt

-- running attempts --
SELECT {attempt_row}
FROM stoker_attempts WHERE outcome IS NULL AND substr(worker_id, 1, length(:worker)) = :worker ORDER BY started, id

-- attempts of worker --
SELECT {attempt_row}
FROM stoker_attempts WHERE worker_id = :worker AND started >= :since ORDER BY started DESC LIMIT :most

-- workers of host --
SELECT id FROM stoker_workers WHERE host = :host ORDER BY started DESC LIMIT :most

-- write log --
INSERT INTO stoker_logs (attempt_id, tail, is_last)
SELECT a.id, :tail, :is_last FROM stoker_attempts a WHERE a.id = :attempt
ON CONFLICT (attempt_id) DO UPDATE SET tail = excluded.tail, is_last = excluded.is_last
RETURNING attempt_id, CASE WHEN :is_last = 0 THEN {not_synced} END

-- late log --
SELECT a.id FROM stoker_attempts a JOIN stoker_workers w ON w.id = a.worker_id
WHERE a.id = :attempt AND a.ended > {now} - :within AND a.outcome <> 'lost' AND w.seen >= {now} - :heard
  AND NOT EXISTS (SELECT 1 FROM stoker_logs l WHERE l.attempt_id = a.id AND l.is_last = 1)

-- read log --
SELECT tail FROM stoker_logs WHERE attempt_id = :attempt

-- last words --
SELECT attempt_id, {last_letters tail} FROM stoker_logs WHERE attempt_id {among attempts}

-- write attempt details --
INSERT INTO stoker_attempt_details (attempt_id, cause, rule, report, fit, written)
SELECT a.id, :cause, :rule, :report, :fit, {now} FROM stoker_attempts a WHERE a.id = :attempt
ON CONFLICT (attempt_id) DO UPDATE SET
  cause = CASE WHEN excluded.cause = '' THEN stoker_attempt_details.cause ELSE excluded.cause END,
  rule = CASE WHEN excluded.cause = '' THEN stoker_attempt_details.rule ELSE excluded.rule END,
  report = CASE WHEN excluded.report = '' THEN stoker_attempt_details.report ELSE excluded.report END,
  fit = CASE WHEN excluded.fit = '{}' THEN stoker_attempt_details.fit ELSE excluded.fit END,
  written = excluded.written
RETURNING attempt_id

-- attempt details --
SELECT cause, rule, report, fit FROM stoker_attempt_details WHERE attempt_id = :attempt

-- causes --
SELECT attempt_id, cause, rule FROM stoker_attempt_details WHERE attempt_id {among attempts} AND cause <> ''

-- stops by rule --
SELECT a.ended, a.gpus, CASE WHEN a.gpus = '[]' THEN j.spec ELSE '' END
FROM stoker_attempt_details f JOIN stoker_attempts a ON a.id = f.attempt_id JOIN stoker_jobs j ON j.id = a.job_id
WHERE f.rule <> '' AND f.written >= :written AND a.ended >= :since
ORDER BY a.ended

-- set link --
UPDATE stoker_jobs SET link = :link
WHERE id = (SELECT job_id FROM stoker_attempts WHERE id = :attempt) AND attempt = :attempt
RETURNING id

-- heartbeat --
INSERT INTO stoker_workers (id, host, view, started, seen, paused)
VALUES (:worker, :host, :view, {now}, {now}, 0)
ON CONFLICT (id) DO UPDATE SET host = excluded.host, view = excluded.view, seen = excluded.seen
RETURNING {not_synced}

-- count workers --
SELECT count(*) FROM stoker_workers WHERE seen >= {now} - :age

-- view of worker --
SELECT view FROM stoker_workers WHERE id = :worker

-- farewell --
UPDATE stoker_workers SET seen = {now}, view = :view WHERE id = :worker

-- workers --
SELECT id, host, view, started, seen, paused FROM stoker_workers ORDER BY host, started, id

-- pause worker --
UPDATE stoker_workers SET paused = :paused WHERE id = :worker RETURNING id

-- pause queue --
UPDATE stoker_queue SET paused = :paused RETURNING one

-- paused --
SELECT paused FROM stoker_queue

-- running without attempt --
SELECT j.id FROM stoker_jobs j
WHERE j.state = 'running'
  AND NOT EXISTS (SELECT 1 FROM stoker_attempts a WHERE a.id = j.attempt AND a.job_id = j.id AND a.outcome IS NULL)
ORDER BY j.id

-- attempts without job --
SELECT a.job_id FROM stoker_attempts a JOIN stoker_jobs j ON j.id = a.job_id
WHERE a.outcome IS NULL AND (j.state <> 'running' OR j.attempt <> a.id)
ORDER BY a.job_id

-- in no known state --
SELECT j.id FROM stoker_jobs j
WHERE j.state NOT IN ('queued', 'held', 'running', 'succeeded', 'failed', 'cancelled') ORDER BY j.id

-- wrongly blocked --
SELECT j.id FROM stoker_jobs j
WHERE j.state IN ('queued', 'held') AND j.blocked <> CASE WHEN {fulfilled j} THEN 0 ELSE 1 END ORDER BY j.id

-- wrongly capped --
SELECT id FROM stoker_jobs WHERE shape <> {shape_now} ORDER BY id

-- open dependencies --
SELECT d.job_id, d.needs FROM stoker_dependencies d JOIN stoker_jobs j ON j.id = d.job_id
WHERE j.state IN ('queued', 'held', 'running')

-- unfinished jobs --
SELECT {job} FROM stoker_jobs j WHERE j.state IN ('queued', 'held', 'running') ORDER BY j.id

-- clock --
SELECT {now}

-- read version --
SELECT version FROM stoker_queue

-- write version --
UPDATE stoker_queue SET version = :version

-- remember origin --
INSERT INTO stoker_forgotten (origin, job_id) VALUES (:origin, :job)

-- jobs by origin --
SELECT {job} FROM stoker_jobs j WHERE j.origin >= :prefix AND j.origin < :beyond ORDER BY j.origin

-- read feed --
SELECT version, memory FROM stoker_feeds WHERE name = :name

-- begin feed --
INSERT INTO stoker_feeds (name, version, memory) VALUES (:name, 1, :memory)
ON CONFLICT (name) DO NOTHING RETURNING version

-- write feed --
UPDATE stoker_feeds SET version = version + 1, memory = :memory
WHERE name = :name AND version = :version RETURNING version

-- write usage --
INSERT INTO stoker_usage (host, gpu, minute, job, background, somebody, free, unknown, utilization, memory, power)
VALUES (:host, :gpu, :minute, :job, :background, :somebody, :free, :unknown, :utilization, :memory, :power)
ON CONFLICT (host, gpu, minute) DO UPDATE SET
  job = excluded.job, background = excluded.background, somebody = excluded.somebody, free = excluded.free,
  unknown = excluded.unknown, utilization = excluded.utilization, memory = excluded.memory, power = excluded.power
WHERE excluded.job + excluded.background + excluded.somebody + excluded.free + excluded.unknown
  >= stoker_usage.job + stoker_usage.background + stoker_usage.somebody + stoker_usage.free + stoker_usage.unknown

-- usage --
SELECT host, gpu, minute, job, background, somebody, free, unknown, utilization, NULL, memory, NULL, power, NULL
FROM stoker_usage

-- usage_means --
SELECT host, gpu, minute / :step, sum(job), sum(background), sum(somebody), sum(free), sum(unknown), avg(utilization),
  max(utilization), CAST(avg(memory) AS DOUBLE PRECISION), max(memory), avg(power), max(power)
FROM stoker_usage

-- usage_of_all --
WHERE minute >= :since AND minute < :until

-- usage_of_host --
WHERE host = :host AND minute >= :since AND minute < :until

-- usage_of_gpu --
WHERE gpu = :gpu AND minute >= :since AND minute < :until

-- usage_of_gpu_of_host --
WHERE (host, gpu, minute) >= (:host, :gpu, :since) AND (host, gpu, minute) < (:host, :gpu, :until)

-- gpus of host --
WITH RECURSIVE gpus (gpu) AS (
  SELECT min(u.gpu) FROM stoker_usage u WHERE u.host = :host
  UNION ALL
  SELECT (SELECT min(u.gpu) FROM stoker_usage u WHERE u.host = :host AND u.gpu > g.gpu) FROM gpus g WHERE g.gpu IS NOT NULL
)
SELECT gpu FROM gpus WHERE gpu IS NOT NULL LIMIT :most

-- usage_by_step --
GROUP BY 1, 2, 3

-- usage_order --
ORDER BY 1, 2, 3

-- usage totals --
SELECT coalesce(sum(job), 0), coalesce(sum(background), 0), coalesce(sum(somebody), 0), coalesce(sum(free), 0),
  coalesce(sum(unknown), 0)
FROM stoker_usage WHERE minute >= :since

-- forget usage --
DELETE FROM stoker_usage WHERE minute < CAST({now} / 60 AS INTEGER) - :minutes

-- write notice --
INSERT INTO stoker_notices (name, sent) VALUES (:name, {now}) ON CONFLICT (name) DO NOTHING RETURNING name

-- delete notice --
DELETE FROM stoker_notices WHERE name = :name RETURNING name

-- forget notices --
DELETE FROM stoker_notices WHERE sent < {now} - :age

-- renew log stream --
UPDATE stoker_log_streams SET until = {now} + :seconds WHERE attempt_id = :attempt AND until > {now} RETURNING attempt_id

-- request log stream --
INSERT INTO stoker_log_streams (attempt_id, until)
SELECT a.id, {now} + :seconds FROM stoker_attempts a WHERE a.id = :attempt
ON CONFLICT (attempt_id) DO UPDATE SET until = excluded.until,
  edition = CASE WHEN stoker_log_streams.complete = 1 THEN stoker_log_streams.edition ELSE '' END
RETURNING (SELECT a.worker_id FROM stoker_attempts a WHERE a.id = attempt_id)

-- log requests --
SELECT a.id, a.job_id, a.number, a.worker_id, l.edition FROM stoker_log_streams l CROSS JOIN stoker_attempts a
WHERE l.until > {now} AND a.id = l.attempt_id

-- advance log stream --
UPDATE stoker_log_streams SET edition = :edition, size = :size, unfinished = :unfinished, behind = :behind,
  complete = :complete
WHERE attempt_id = :attempt AND until > {now} AND (edition = :edition OR :start = 0) RETURNING attempt_id

-- drop log stream --
UPDATE stoker_log_streams SET edition = '' WHERE attempt_id = :attempt

-- drop other editions --
DELETE FROM stoker_log_chunks WHERE (attempt_id, edition, start) IN (
  SELECT attempt_id, edition, start FROM stoker_log_chunks WHERE attempt_id = :attempt AND edition <> :edition LIMIT :most)

-- write log chunk --
INSERT INTO stoker_log_chunks (attempt_id, edition, start, data) VALUES (:attempt, :edition, :start, :data)

-- log stream --
SELECT edition, size, unfinished, behind, complete FROM stoker_log_streams WHERE attempt_id = :attempt AND edition <> ''

-- log chunks --
SELECT start, data FROM stoker_log_chunks WHERE attempt_id = :attempt AND edition = :edition AND start >= :start
ORDER BY start LIMIT :most

-- expire log chunks --
DELETE FROM stoker_log_chunks WHERE (attempt_id, edition, start) IN (
  SELECT p.attempt_id, p.edition, p.start FROM stoker_log_streams l CROSS JOIN stoker_log_chunks p
  WHERE l.until < {now} - :seconds AND p.attempt_id = l.attempt_id LIMIT :most)
RETURNING start

-- expire log streams --
DELETE FROM stoker_log_streams WHERE until < {now} - :seconds

-- insert blob --
INSERT INTO stoker_blobs (digest, size) VALUES (:digest, :size) ON CONFLICT (digest) DO NOTHING RETURNING digest

-- insert blob chunk --
INSERT INTO stoker_blob_chunks (digest, number, data) VALUES (:digest, :number, :data)

-- known blobs --
SELECT digest FROM stoker_blobs WHERE digest {among digests}

-- refer to blob --
INSERT INTO stoker_blob_uses (job_id, digest) VALUES (:job, :digest)

-- blob chunk --
SELECT data FROM stoker_blob_chunks WHERE digest = :digest AND number = :number

-- lock unused blobs --
SELECT b.digest FROM stoker_blobs b
WHERE NOT EXISTS (SELECT 1 FROM stoker_blob_uses u WHERE u.digest = b.digest)
ORDER BY b.digest LIMIT :most
{skip_locked b}

-- delete unused blobs --
DELETE FROM stoker_blobs
WHERE digest {among digests} AND NOT EXISTS (SELECT 1 FROM stoker_blob_uses u WHERE u.digest = stoker_blobs.digest)
RETURNING size
