/* The top of the page: the run in one sentence, what is safe, where the time went, its labels. */
(function (hf) {
    "use strict";
    const { el, id, joined, say } = hf;

    function progress(run) {
        const box = id("progress");
        const known = hf.isNumber(run.step) && hf.isNumber(run.total) && run.total > 0;
        box.hidden = !known;
        if (!known) return;
        const bar = id("progress-bar");
        if (!bar.firstChild) {
            bar.append(el("div.bar-fill"), el("div.bar-mark"));
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

    const toMinute = (t) => hf.moment(t).replace(/:\d\d$/, "");

    /** What the head of a run says: [name, value, more]. */
    function factsOf(view) {
        const { run, goodput } = view;
        const known = hf.isNumber;
        const ago = (age) => (run.is_live && known(age) ? `${hf.duration(age)} ago` : "");
        const rate = run.rate_per_second;
        const isEnding = run.job && run.is_live && known(run.job.seconds_left);
        const hosts = new Set(view.ranks.map((rank) => rank.host).filter(Boolean)).size;
        const epoch = known(run.epoch) && joined([`epoch ${run.epoch}`, run.epochs], " of ");
        const ranks = run.ranks > 1 && hf.plural(run.ranks, "rank");
        return [
            known(run.step) && [
                "Step",
                hf.whole(run.step),
                joined([epoch, run.phase && `in ${run.phase}`], ", "),
            ],
            rate > 0 && [
                "Speed",
                rate >= 1
                    ? `${hf.number(Number(rate.toPrecision(3)))} steps/s`
                    : `${hf.duration(1 / rate)} per step`,
            ],
            run.is_live &&
                known(run.eta_seconds) && [
                    "Done in about",
                    hf.duration(run.eta_seconds),
                    toMinute(view.made_at + run.eta_seconds),
                ],
            ...["memory", "disk"].map(
                (place) =>
                    known(run[`${place}_step`]) && [
                        place === "disk" ? "Safe on disk" : "Safe in memory",
                        `step ${hf.whole(run[`${place}_step`])}`,
                        ago(run[`${place}_age_seconds`]),
                    ],
            ),
            run.job && [
                "Job",
                isEnding ? `${hf.duration(run.job.seconds_left)} left` : run.job.id,
                isEnding ? `SLURM ${run.job.id}` : run.job.text,
            ],
            known(run.attempt) && [
                "Attempt",
                hf.whole(run.attempt),
                joined(
                    [
                        hosts > 1 ? joined([ranks, `${hosts} hosts`], " on ") : ranks,
                        hosts > 1 ? "" : run.host,
                        run.is_live && run.pid && `pid ${run.pid}`,
                    ],
                    ", ",
                ),
            ],
            goodput.wall_seconds > 0 && [
                "Wall time",
                hf.duration(goodput.wall_seconds),
                `since ${toMinute(view.time.start)}`,
            ],
        ].filter(Boolean);
    }

    function facts(view) {
        const rows = factsOf(view);
        if (!hf.changed("facts", rows)) return;
        id("facts").replaceChildren(
            ...rows.map(([name, value, more]) =>
                el(
                    "div",
                    el("dt", name),
                    el("dd", value, more ? el("small", { title: more }, more) : null),
                ),
            ),
        );
    }

    function config(view) {
        const rows = Object.entries(view.run.config || {});
        if (!hf.changed("config", rows)) return;
        const table = () =>
            hf.table(
                "Hyperparameters",
                [
                    ["Name", "", ([name]) => name],
                    ["Value", "", ([, value]) => hf.pythonText(value)],
                ],
                rows,
            );
        id("config").replaceChildren(...(rows.length ? [hf.folded("Hyperparameters", table)] : []));
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
        const bar = el("div.shares", { aria: { hidden: "true" } });
        for (const part of parts) {
            const piece = el("div", { className: "share " + hf.kindClass(part.kind) });
            piece.style.flexGrow = String(part.share);
            piece.title = `${part.label}: ${hf.duration(part.seconds)}, ${hf.percent(part.share)}`;
            bar.append(piece);
        }
        const list = el(
            "ul.share-list",
            parts.map((part) =>
                el(
                    "li",
                    hf.swatch(part.kind),
                    el("span.share-name", part.label),
                    el("span.num", hf.duration(part.seconds)),
                    el("span.num.muted", hf.percent(part.share)),
                ),
            ),
        );
        const share = hf.isNumber(good.share)
            ? (good.share * 100).toFixed(1).replace(/\.0$/, "")
            : "–";
        id("goodput-body").replaceChildren(
            el(
                "div.figure",
                el("p.figure-number", share, el("small", " %")),
                el(
                    "p.small.muted",
                    `${hf.duration(good.progress_seconds)} of progress in ${hf.duration(counted)}`,
                ),
                good.stopped_seconds > 0 &&
                    el(
                        "p.small.muted",
                        `${hf.duration(good.stopped_seconds)} stopped on purpose, not counted`,
                    ),
            ),
            el("div.goodput-where", el("p.goodput-sentence", hf.capital(good.sentence)), bar, list),
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
        config(view);
        if (hf.changed("warnings", run.warnings)) {
            id("warnings").replaceChildren(
                ...run.warnings.map((warning) => el("p.notice.is-warn", hf.capital(warning))),
            );
        }
        goodput(view);
        const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "the local zone";
        const foot = [
            `Made by holdfast ${view.version} on ${hf.moment(view.made_at)}.`,
            `Times are those of ${zone}.`,
        ].join(" ");
        if (hf.changed("foot", foot + run.folder)) {
            id("foot").replaceChildren(el("p", foot), el("p", el("span.mono", run.folder)));
        }
    };

    // -- tags, a note and the archive: shown here, changed in a dialog -------------------------

    let held = { tags: [], note: "", is_archived: false };

    const canChange = () => Boolean(document.documentElement.dataset.labels);

    hf.labels = function (view) {
        held = { tags: view.run.tags, note: view.run.note, is_archived: view.run.is_archived };
        if (!hf.changed("labels", held)) return;
        const words = held.tags.length || held.note ? "Edit labels" : "Add tags or a note";
        const edit = hf.button(words, "", open, ".is-quiet");
        edit.id = "labels-edit";
        id("labels").replaceChildren(
            ...held.tags.map((tag) => el("span.tag", tag)),
            ...(held.is_archived ? [el("span.tag.is-plain", "archived")] : []),
            ...(canChange() ? [edit] : []),
            ...(held.note ? [el("p.note", held.note)] : []),
        );
        id("labels").hidden = !id("labels").firstChild;
    };

    function open() {
        id("labels-tags").value = held.tags.join(", ");
        id("labels-note").value = held.note;
        id("labels-archived").checked = held.is_archived;
        say(id("labels-answer"), "");
        id("labels-dialog").showModal();
    }

    async function save(event) {
        event.preventDefault();
        const wanted = {
            tags: id("labels-tags").value.split(",").map((tag) => tag.trim()).filter(Boolean),
            note: id("labels-note").value,
            is_archived: id("labels-archived").checked,
        };
        const told = await hf.post(document.documentElement.dataset.labels, wanted);
        if (!told.ok) {
            say(id("labels-answer"), String(told.sentence));
            return;
        }
        id("labels-dialog").close();
        hf.view.run = { ...hf.view.run, ...told.labels };
        hf.labels(hf.view);
        if (id("labels-edit")) id("labels-edit").focus();
    }

    id("labels-form").addEventListener("submit", save);
    id("labels-cancel").addEventListener("click", () => id("labels-dialog").close());

    /** Links to the sections that have something to say. */
    hf.places = function () {
        const all = [...document.querySelectorAll("main > .section")];
        const shown = all.filter((each) => !each.hidden).map((each) => each.id);
        if (!hf.changed("places", shown)) return;
        id("places").parentElement.hidden = !shown.length;
        id("places").replaceChildren(
            ...shown.map((name) =>
                el("li", el("a", { href: "#" + name }, id(name + "-title").textContent)),
            ),
        );
    };
})(holdfast);
