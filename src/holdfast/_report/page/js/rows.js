/* A run as a row of the table. Whatever a run says of itself goes through textContent only. */
(function (hf) {
  "use strict";
  const { el, whole } = hf;
  let ahead = 0; // of our clock, in seconds: the server may stand behind a tunnel

  hf.setClock = (server) => { ahead = Date.now() / 1000 - server; };
  hf.now = () => Date.now() / 1000 - ahead;

  function span(seconds) {
    const all = Math.max(0, Math.round(seconds));
    if (all < 60) return `${all} s`;
    if (all < 3600) return `${Math.floor(all / 60)} min`;
    if (all < 86400) return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
    return `${Math.floor(all / 86400)} d`;
  }

  function ago(moment) {
    const passed = hf.now() - moment;
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
    return [`${span(row.job.end - hf.now())} left`, `job ${row.job.id}`];
  }

  function lines(cell, texts) {
    const spans = texts.map((text, at) => el("span", { className: at ? "more" : "" }, text));
    cell.replaceChildren(...(texts.length ? [el("div", spans)] : []));
  }

  /* Make a row once; `fill` sets what has changed, so that focus and selection stay. */
  hf.makeRow = function (onPick) {
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
  };

  hf.fillRow = function (made, row) {
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
  };

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
})(holdfast);
