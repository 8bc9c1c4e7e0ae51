/* The list of runs: what has changed is asked for, and fifty rows at a time are drawn. */
(function (hf) {
  "use strict";
  const { el, id: $, say, whole } = hf;
  const root = document.documentElement;
  const PER_PAGE = 50;
  const OFTEN = 1500;
  const HIDDEN = 15000;
  const OLD = 3 * 86400;
  const MOST_COMPARED = 100; // as the server
  const rows = new Map(); // by key
  const drawn = new Map(); // by key, what stands in the table
  const picked = new Set(); // keys, to be compared
  const table = document.querySelector("table.runs");
  const body = table.tBodies[0];
  const wish = { q: "", show: "all", order: "attention", page: 0 };
  let revision = 0;
  let wait = OFTEN;
  let status = { found: 0, read: 0, done: false };

  // -- which rows, in which order ------------------------------------------------------

  function rank(row) {
    if (row.live) return row.troubled ? 0 : 1;
    return row.troubled && (!row.at || now() - row.at < OLD) ? 2 : 3;
  }

  // One for all: to make it takes longer than a hundred comparisons.
  const alphabet = new Intl.Collator("en", { numeric: true });
  const byName = (a, b) => alphabet.compare(a.name, b.name);
  const orders = {
    // Live ones by name: all of them have just changed, and rows must not move around.
    attention: (a, b) => rank(a) - rank(b) || (a.live ? 0 : b.at - a.at) || byName(a, b),
    recent: (a, b) => Number(b.live) - Number(a.live) || (a.live ? 0 : b.at - a.at) || byName(a, b),
    name: byName,
  };
  const kinds = {
    all: (row) => !row.archived,
    live: (row) => row.live,
    trouble: (row) => row.troubled && !row.archived,
    ended: (row) => !row.live && !row.archived,
    archived: (row) => Boolean(row.archived),
  };

  function chosen() {
    const wanted = wish.q.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [];
    for (const row of rows.values()) {
      if (!kinds[wish.show](row)) continue;
      if (wanted.length) {
        const job = row.job ? row.job.id : "";
        if (row.text === undefined) {
          const all = [row.name, row.state, row.host, job, row.config, row.note, ...(row.tags || []), ...(row.warnings || [])];
          row.text = all.filter(Boolean).join(" ").toLowerCase();
        }
        if (!wanted.every((word) => row.text.includes(word))) continue;
      }
      found.push(row);
    }
    return found.sort(orders[wish.order]);
  }

  // -- drawing -------------------------------------------------------------------------

  function draw() {
    const found = chosen();
    const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
    wish.page = Math.min(wish.page, pages - 1);
    const from = wish.page * PER_PAGE;
    const shown = found.slice(from, from + PER_PAGE);
    drawRows(shown);
    table.hidden = shown.length === 0;
    $("empty").hidden = shown.length > 0;
    $("empty").textContent = emptyWords();
    document.querySelector(".pager").hidden = pages === 1;
    $("before").disabled = wish.page === 0;
    $("after").disabled = wish.page === pages - 1;
    say($("where"), shown.length ? `${whole(from + 1)} to ${whole(from + shown.length)} of ${whole(found.length)}` : "");
    drawCounts();
    drawCompare(found);
    return found.length;
  }

  function drawRows(shown) {
    // On a workstation there are no jobs, and the column would be empty.
    table.classList.toggle("has-no-jobs", ![...rows.values()].some((row) => row.job));
    const keep = new Set(shown.map((row) => row.key));
    // To fill a row again is quicker than to make one; the one with the focus goes, with its run.
    const spare = [];
    for (const [key, made] of drawn) {
      if (keep.has(key)) continue;
      drawn.delete(key);
      if (made.tr.contains(document.activeElement)) made.tr.remove();
      else spare.push(made);
    }
    let before = null;
    for (const row of shown) {
      let made = drawn.get(row.key);
      if (!made) {
        made = spare.pop() || makeRow(pick);
        made.key = row.key;
        made.link.href = root.dataset.run + encodeURIComponent(row.key);
        drawn.set(row.key, made);
      }
      made.box.checked = picked.has(row.key);
      fillRow(made, row);
      const due = before ? before.nextSibling : body.firstChild;
      if (due !== made.tr) body.insertBefore(made.tr, due); // else it would lose the focus
      before = made.tr;
    }
    for (const made of spare) made.tr.remove();
  }

  function emptyWords() {
    if (rows.size) return "No run is like that.";
    if (!status.done) return "Looking for runs…";
    return `There is no run in ${root.dataset.folder} yet. One appears here as soon as it begins.`;
  }

  // -- a selection to be compared ------------------------------------------------------

  function pick(key, isPicked) {
    if (isPicked) picked.add(key);
    else picked.delete(key);
    drawCompare(chosen());
  }

  function drawCompare(found) {
    for (const key of picked) if (!rows.has(key)) picked.delete(key);
    const keys = picked.size ? [...picked] : found.slice(0, MOST_COMPARED).map((row) => row.key);
    const link = $("compare");
    const wanted = new URLSearchParams(keys.map((key) => ["run", key]));
    link.href = `${root.dataset.compare}?${wanted}`;
    link.hidden = keys.length === 0;
    const rest = found.length > keys.length ? `Compare the first ${whole(keys.length)}` : `Compare all ${whole(keys.length)}`;
    say(link, picked.size ? `Compare ${whole(picked.size)} selected` : rest);
    $("unpick").hidden = picked.size === 0;
  }

  function drawCounts() {
    const counts = { all: 0, live: 0, trouble: 0, ended: 0, archived: 0 };
    for (const row of rows.values()) {
      for (const kind of Object.keys(counts)) counts[kind] += kinds[kind](row) ? 1 : 0;
    }
    $("count-archived").parentElement.hidden = !counts.archived && wish.show !== "archived";
    for (const kind of Object.keys(counts)) say($(`count-${kind}`), whole(counts[kind]));
    const reading = status.done ? "" : `, ${whole(status.read)} of ${whole(status.found)} read so far`;
    say($("state"), `${root.dataset.folder}${reading}. holdfast ${root.dataset.version}`);
  }

  function tellNotes(notes) {
    if (!hf.changed("notes", notes)) return;
    $("notes").replaceChildren(...notes.map((text) => el("p.notice.is-warn", text)));
  }

  function tellTrouble(text) {
    $("trouble").hidden = !text;
    say($("trouble"), text);
  }

  // -- a run as a row: what it says of itself goes through textContent only -------------

  let ahead = 0; // of our clock, in seconds: the server may stand behind a tunnel

  const setClock = (server) => { ahead = Date.now() / 1000 - server; };
  const now = () => Date.now() / 1000 - ahead;

  function span(seconds) {
    const all = Math.max(0, Math.round(seconds));
    if (all < 60) return `${all} s`;
    if (all < 3600) return `${Math.floor(all / 60)} min`;
    if (all < 86400) return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
    return `${Math.floor(all / 86400)} d`;
  }

  function ago(moment) {
    const passed = now() - moment;
    return passed < 5 ? "now" : `${span(passed)} ago`;
  }

  function progress(row) {
    if (row.step === undefined) return "";
    const total = row.total ? ` of ${whole(row.total)}` : "";
    const epoch = row.epoch && row.epochs ? `epoch ${row.epoch} of ${row.epochs}, ` : "";
    return `${epoch}step ${whole(row.step)}${total}`;
  }

  /* What a live run still needs, and its newest loss; of an ended one the last loss. */
  function outlook(row) {
    const found = [];
    if (row.live && row.left !== undefined) found.push(`about ${span(row.left)} left`);
    if (row.metric) found.push(`${row.metric[0]} ${hf.number(row.metric[1])}`);
    return found.join(", ");
  }

  function share(row) {
    if (!row.total || row.step === undefined) return null;
    return Math.max(0, Math.min(1, row.step / row.total));
  }

  function safe(row) {
    const memory = row.memory_step;
    const disk = row.disk_step;
    if (memory === undefined && disk === undefined) {
      return row.state === "unreadable" ? [] : [row.live || row.state === "new" ? "nothing yet" : "nothing"];
    }
    const lines = [];
    if (memory !== undefined && (row.live || disk === undefined || memory > disk)) {
      lines.push(`step ${whole(memory)} in memory`);
    }
    if (disk === undefined) lines.push("nothing on disk");
    else lines.push(`step ${whole(disk)} on disk` + (row.disk_at ? `, ${ago(row.disk_at)}` : ""));
    return lines;
  }

  function job(row) {
    if (!row.job) return [];
    if (!row.job.end) return [`job ${row.job.id}`];
    return [`${span(row.job.end - now())} left`, `job ${row.job.id}`];
  }

  function lines(cell, texts) {
    const spans = texts.map((text, at) => el("span", { className: at ? "more" : "" }, text));
    cell.replaceChildren(...(texts.length ? [el("div", spans)] : []));
  }

  /* Make a row once; `fill` sets what has changed, so that focus and selection stay. */
  function makeRow(onPick) {
    const box = el("input", { type: "checkbox", on: { change: () => onPick(made.key, box.checked) } });
    const link = el("a");
    const under = el("div");
    const chip = el("span.chip");
    const cells = ["State", "Progress", "Safe", "SLURM", "Last sign"].map((label) => {
      const className = label === "State" ? "" : label === "SLURM" ? "wide slurm" : "wide";
      return el("td", { className, role: "cell", data: { label } });
    });
    cells[0].append(chip);
    const tr = el(
        "tr",
        { role: "row" },
        el("td.pick", { role: "cell" }, el("label", box)),
        el("th", { scope: "row", role: "rowheader" }, link, under),
        cells,
    );
    const made = { tr, box, link, under, chip, cells, key: "", told: "" };
    return made;
  }

  function fillRow(made, row) {
    const shown = { progress: progress(row), safe: safe(row), job: job(row), at: row.at ? ago(row.at) : "" };
    const told = JSON.stringify([row, shown]);
    if (told === made.told) return;
    made.told = told;
    made.link.textContent = row.name;
    made.box.setAttribute("aria-label", `Select ${row.name}`);
    made.chip.textContent = row.state;
    made.chip.dataset.state = row.state;
    const span = (className, text) => text && el("span", { className }, text);
    const worse = row.state === "stuck" || row.state === "unreadable";
    const where = [row.host && `on ${row.host}`, row.ranks && `${row.ranks} ranks`, row.attempt > 1 && `attempt ${row.attempt}`];
    const under = [
      span("more", where.filter(Boolean).join(", ")),
      row.how !== row.state && row.how !== "closed" && span("more", row.how),
      ...(row.warnings || []).map((text) => span(worse ? "warning is-bad" : "warning", text)),
      row.tags && el("span.tags", row.tags.map((tag) => span("tag", tag))),
      span("more", row.note),
    ];
    made.under.replaceChildren(...under.filter(Boolean));
    fillProgress(made.cells[1], row, shown.progress, span);
    lines(made.cells[2], shown.safe);
    lines(made.cells[3], shown.job);
    lines(made.cells[4], shown.at ? [row.live ? "live" : shown.at] : []);
  }

  function fillProgress(cell, row, text, span) {
    const part = share(row);
    const bar = el("div.bar", { aria: { hidden: "true" } }, el("div.bar-fill"));
    if (part !== null) bar.firstChild.style.width = `${100 * part}%`; // the words say the same
    const parts = [
      span("", part === null ? text : `${text} (${Math.floor(100 * part)}%)`),
      part !== null && bar,
      span("more", outlook(row)),
      row.phase && span("more", `in ${row.phase}`),
    ].filter(Boolean);
    cell.replaceChildren(...(parts.length ? [el("div", parts)] : []));
  }

  // -- asking --------------------------------------------------------------------------

  async function ask() {
    try {
      const answer = await fetch(`${root.dataset.runs}?since=${revision}`, { cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) {
        tellTrouble("This page’s key is no longer valid. Open the address that holdfast ui printed.");
        wait = 30000;
      } else if (!answer.ok) {
        throw new Error(String(answer.status));
      } else {
        take(await answer.json());
      }
    } catch {
      tellTrouble("holdfast ui does not answer. What you see is how things were when it last did.");
      wait = Math.min(30000, wait * 2);
    }
    return document.hidden ? Math.max(wait, HIDDEN) : wait;
  }

  function take(found) {
    setClock(found.now);
    if (found.starts_over) rows.clear();
    for (const row of found.rows) {
      if (row.gone) rows.delete(row.key);
      else rows.set(row.key, row);
    }
    revision = found.revision;
    status = found;
    wait = found.more ? 0 : found.done ? OFTEN : 300;
    tellTrouble("");
    tellNotes(found.notes);
    if (!found.more || drawn.size < PER_PAGE) draw();
  }

  // -- wishes --------------------------------------------------------------------------

  function remember() {
    const kept = new URLSearchParams();
    for (const [name, value] of Object.entries(wish)) {
      if (value && value !== "all" && value !== "attention") kept.set(name, value);
    }
    const text = kept.toString();
    history.replaceState(null, "", text ? `#${text}` : location.pathname);
  }

  function recall() {
    const kept = new URLSearchParams(location.hash.slice(1));
    wish.q = kept.get("q") || "";
    wish.show = kinds[kept.get("show")] ? kept.get("show") : "all";
    wish.order = orders[kept.get("order")] ? kept.get("order") : "attention";
    wish.page = Math.max(0, parseInt(kept.get("page"), 10) || 0);
    $("search").value = wish.q;
    $("order").value = wish.order;
    press();
  }

  function press() {
    for (const button of document.querySelectorAll("[data-show]")) {
      button.setAttribute("aria-pressed", String(button.dataset.show === wish.show));
    }
  }

  function want(change) {
    Object.assign(wish, { page: 0 }, change);
    press();
    remember();
    const count = draw();
    say($("said"), hf.plural(count, "run"));
  }

  for (const button of document.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => want({ show: button.dataset.show }));
  }
  $("search").addEventListener("input", () => want({ q: $("search").value }));
  $("order").addEventListener("change", () => want({ order: $("order").value }));
  $("unpick").addEventListener("click", () => {
    picked.clear();
    draw();
    $("search").focus();
  });
  $("before").addEventListener("click", () => turn(-1));
  $("after").addEventListener("click", () => turn(1));
  document.querySelector("form.tools").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", (event) => {
    const inField = event.target.type !== "checkbox" && /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "/" && !inField && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      $("search").focus();
    }
  });

  function turn(by) {
    want({ page: wish.page + by });
    $("runs").focus({ preventScroll: true });
    $("runs").scrollIntoView({ block: "start" });
  }

  for (const row of JSON.parse($("holdfast-rows").textContent)) rows.set(row.key, row);
  recall();
  draw();
  performance.mark("holdfast-first-view");
  setInterval(draw, 10000); // ages grow
  hf.repeat(ask)();
})(holdfast);
