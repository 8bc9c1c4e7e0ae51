/* The top of the page: the run in one sentence, what is safe, and where the time went. */
(function (hf) {
    "use strict";
    const { el, id, say } = hf;

    function progress(run) {
        const box = id("progress");
        const known = hf.isNumber(run.step) && hf.isNumber(run.total) && run.total > 0;
        box.hidden = !known;
        if (!known) return;
        const bar = id("progress-bar");
        if (!bar.firstChild) {
            bar.append(el("div", { className: "bar-fill" }), el("div", { className: "bar-mark" }));
        }
        const share = (step) => Math.min(100, Math.max(0, (100 * step) / run.total)) + "%";
        bar.firstChild.style.width = share(run.step);
        bar.lastChild.hidden = !hf.isNumber(run.disk_step);
        if (!bar.lastChild.hidden) bar.lastChild.style.left = share(run.disk_step);
        bar.setAttribute("aria-valuemin", "0");
        bar.setAttribute("aria-valuemax", String(run.total));
        bar.setAttribute("aria-valuenow", String(run.step));
        const words = id("progress-words");
        // Down, as in the sentence above: 100 % only at the end.
        const done = Math.min(100, Math.floor((100 * run.step) / run.total));
        const left = `${done} % of ${hf.whole(run.total)} steps`;
        const right =
            hf.isNumber(run.disk_step) && run.disk_step < run.total
                ? `mark: on disk to step ${hf.whole(run.disk_step)}`
                : "";
        if (words.children.length !== 2) words.replaceChildren(el("span"), el("span"));
        say(words.firstChild, left);
        say(words.lastChild, right);
    }

    function ago(seconds, isLive) {
        if (!hf.isNumber(seconds)) return "";
        return isLive ? `${hf.duration(seconds)} ago` : "";
    }

    function facts(view) {
        const run = view.run;
        const rows = [];
        const add = (name, value, more) => rows.push([name, value, more || ""]);
        if (hf.isNumber(run.step)) {
            const epoch = hf.isNumber(run.epoch)
                ? `epoch ${run.epoch}${hf.isNumber(run.epochs) ? ` of ${run.epochs}` : ""}`
                : "";
            add(
                "Step",
                hf.whole(run.step),
                [epoch, run.phase ? `in ${run.phase}` : ""].filter(Boolean).join(", "),
            );
        }
        if (hf.isNumber(run.rate_per_second) && run.rate_per_second > 0) {
            const quick = run.rate_per_second >= 1;
            add(
                "Speed",
                quick
                    ? `${hf.number(Number(run.rate_per_second.toPrecision(3)))} steps/s`
                    : `${hf.duration(1 / run.rate_per_second)} per step`,
            );
        }
        if (run.is_live && hf.isNumber(run.eta_seconds)) {
            add(
                "Done in about",
                hf.duration(run.eta_seconds),
                hf.moment(view.made_at + run.eta_seconds).replace(/:\d\d$/, ""),
            );
        }
        if (hf.isNumber(run.memory_step)) {
            add(
                "Safe in memory",
                `step ${hf.whole(run.memory_step)}`,
                ago(run.memory_age_seconds, run.is_live),
            );
        }
        if (hf.isNumber(run.disk_step)) {
            add(
                "Safe on disk",
                `step ${hf.whole(run.disk_step)}`,
                ago(run.disk_age_seconds, run.is_live),
            );
        }
        if (run.job) {
            const left = hf.isNumber(run.job.seconds_left);
            add(
                "Job",
                left && run.is_live ? `${hf.duration(run.job.seconds_left)} left` : run.job.id,
                left && run.is_live ? `SLURM ${run.job.id}` : run.job.text,
            );
        }
        if (hf.isNumber(run.attempt)) {
            const hosts = new Set(view.ranks.map((rank) => rank.host).filter(Boolean)).size;
            add(
                "Attempt",
                hf.whole(run.attempt),
                [
                    run.ranks > 1
                        ? hf.plural(run.ranks, "rank") + (hosts > 1 ? ` on ${hosts} hosts` : "")
                        : "",
                    hosts > 1 ? "" : run.host || "",
                    run.is_live && run.pid ? `pid ${run.pid}` : "",
                ]
                    .filter(Boolean)
                    .join(", "),
            );
        }
        if (view.goodput.wall_seconds > 0) {
            add(
                "Wall time",
                hf.duration(view.goodput.wall_seconds),
                `since ${hf.moment(view.time.start).replace(/:\d\d$/, "")}`,
            );
        }
        if (!hf.changed("facts", rows)) return;
        id("facts").replaceChildren(
            ...rows.map(([name, value, more]) =>
                el(
                    "div",
                    {},
                    el("dt", {}, name),
                    el("dd", {}, value, more ? el("small", { title: more }, more) : null),
                ),
            ),
        );
    }

    function goodput(view) {
        const good = view.goodput;
        id("goodput").hidden = !(good && good.wall_seconds > 0);
        if (id("goodput").hidden || !hf.changed("goodput", good)) return;
        // The time in which it was stopped on purpose is neither progress nor loss.
        const counted = good.wall_seconds - (good.stopped_seconds || 0);
        const parts = good.parts
            .filter((part) => part.kind !== "stopped")
            .map((part) => ({ ...part, share: part.seconds / (counted || 1) }))
            .filter((part) => part.seconds >= 1 || part.share >= 0.001);
        const isProgress = (part) => ["progress", "training", "phase"].includes(part.kind);
        parts.sort((a, b) => isProgress(b) - isProgress(a) || b.seconds - a.seconds);
        const bar = el("div", { className: "shares", aria: { hidden: "true" } });
        for (const part of parts) {
            const piece = el("div", { className: "share " + hf.kindClass(part.kind) });
            piece.style.flexGrow = String(part.share);
            piece.title = `${part.label}: ${hf.duration(part.seconds)}, ${hf.percent(part.share)}`;
            bar.append(piece);
        }
        const list = el(
            "ul",
            { className: "share-list" },
            parts.map((part) =>
                el(
                    "li",
                    {},
                    el("span", {
                        className: "swatch " + hf.kindClass(part.kind),
                        aria: { hidden: "true" },
                    }),
                    el("span", { className: "share-name" }, part.label),
                    el("span", { className: "num" }, hf.duration(part.seconds)),
                    el("span", { className: "num muted" }, hf.percent(part.share)),
                ),
            ),
        );
        const share = hf.isNumber(good.share)
            ? (good.share * 100).toFixed(1).replace(/\.0$/, "")
            : "–";
        id("goodput-body").replaceChildren(
            el(
                "div",
                { className: "figure" },
                el("p", { className: "figure-number" }, share, el("small", {}, " %")),
                el(
                    "p",
                    { className: "small muted" },
                    `${hf.duration(good.progress_seconds)} of progress in ${hf.duration(counted)}`,
                ),
                good.stopped_seconds > 0
                    ? el(
                          "p",
                          { className: "small muted" },
                          `${hf.duration(good.stopped_seconds)} stopped on purpose, not counted`,
                      )
                    : null,
            ),
            el(
                "div",
                { className: "goodput-where" },
                el("p", { className: "goodput-sentence" }, hf.capital(good.sentence)),
                bar,
                list,
            ),
        );
    }

    hf.summary = function (view) {
        const run = view.run;
        document.title = `${run.name} · holdfast`;
        say(id("name"), run.name);
        id("name").title = run.folder;
        const state = id("state");
        say(state, run.state);
        state.dataset.state = run.state;
        say(id("headline"), run.headline);
        progress(run);
        facts(view);
        if (hf.changed("warnings", run.warnings)) {
            id("warnings").replaceChildren(
                ...run.warnings.map((warning) =>
                    el("p", { className: "notice is-warn" }, hf.capital(warning)),
                ),
            );
        }
        goodput(view);
        const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "the local zone";
        const foot = [
            `Made by holdfast ${view.version} on ${hf.moment(view.made_at)}.`,
            `Times are those of ${zone}.`,
        ].join(" ");
        if (hf.changed("foot", foot + run.folder)) {
            id("foot").replaceChildren(
                el("p", {}, foot),
                el("p", {}, el("span", { className: "mono" }, run.folder)),
            );
        }
    };

    const PLACES = [
        "goodput",
        "timeline",
        "metrics",
        "speed",
        "memory",
        "gpus",
        "output",
        "checkpoints",
        "postmortems",
        "proofs",
        "attempts",
    ];
    /** Links to the sections that have something to say. */
    hf.places = function () {
        const shown = PLACES.filter((name) => !id(name).hidden);
        if (!hf.changed("places", shown)) return;
        id("places").parentElement.hidden = !shown.length;
        id("places").replaceChildren(
            ...shown.map((name) =>
                el("li", {}, el("a", { href: "#" + name }, id(name + "-title").textContent)),
            ),
        );
    };
})(holdfast);
