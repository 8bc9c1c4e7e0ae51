/* Step time, ranks, memory, GPUs and checkpoints: the charts over time. */
(function (hf) {
    "use strict";
    const { el, id } = hf;
    const made = {};
    let view = null;

    const largest = (values) => values.reduce((most, value) => (value > most ? value : most), 0);
    /** Columns of [t, ...values], t as a place on the folded axis; ascending, as uPlot wants it. */
    function placed(isLine, t, ...values) {
        const starts = isLine ? view.attempts.map((attempt) => attempt.start) : [];
        const columns = [[], ...values.map(() => [])];
        let next = 0;
        let last = -Infinity;
        t.forEach((time, index) => {
            if (time < last) return;
            // No line leads over the time between two attempts.
            while (next < starts.length && starts[next] <= last) next += 1;
            if (next < starts.length && starts[next] <= time && last > -Infinity) {
                columns[0].push(hf.span.axis.to((last + time) / 2));
                for (const column of columns.slice(1)) column.push(null);
            }
            last = time;
            columns[0].push(hf.span.axis.to(time));
            values.forEach((column, at) =>
                columns[at + 1].push(hf.isNumber(column[index]) ? column[index] : null),
            );
        });
        return columns;
    }
    const when = (place) => hf.moment(hf.span.axis.from(place));
    /** A table over time, newest first, of at most 200 rows; columns: [title, values, format]. */
    function timeTable(title, t, columns) {
        const stride = Math.ceil(t.length / 200) || 1;
        const rows = t.map((_, at) => at).filter((at) => (t.length - 1 - at) % stride === 0);
        const cell = (values, format) => (at) => (hf.isNumber(values[at]) ? format(values[at]) : "–");
        return hf.table(
            `${title} over time, newest first`,
            [
                ["When", "", (at) => hf.moment(t[at])],
                ...columns.map(([name, values, format]) => [name, "num", cell(values, format)]),
            ],
            rows.reverse(),
        );
    }
    const BYTE_SIZES = hf.roundSizes(17);

    function once(name, body, make) {
        if (!made[name]) {
            made[name] = make();
            body.append(made[name].box);
        } else made[name].update();
        return made[name];
    }

    function speed() {
        const times = view.step_time;
        const has = times.percentiles && times.percentiles.count > 0;
        id("speed").hidden = !has && !view.ranks.length;
        if (id("speed").hidden) return;
        const body = id("speed-body");
        if (!body.firstChild) {
            made.percentiles = el("dl.facts.facts-small");
            made.attemptTimes = hf.folded("Percentiles by attempt", () =>
                hf.table(
                    "Step time by attempt",
                    [
                        ["Attempt", "num", (each) => hf.whole(each.number)],
                        ["Median", "num", (each) => hf.duration(each.p50)],
                        ["90 %", "num", (each) => hf.duration(each.p90)],
                        ["99 %", "num", (each) => hf.duration(each.p99)],
                    ],
                    view.step_time.attempts,
                ),
            );
            made.ranks = el("div.ranks");
            body.append(made.percentiles);
        }
        if (has) {
            const { p50, p90, p99, max, count } = times.percentiles;
            hf.say(id("speed-words"), `${hf.plural(count, "step")} timed.`);
            if (hf.changed("percentiles", times.percentiles)) {
                made.percentiles.replaceChildren(
                    ...[
                        ["Median", p50],
                        ["90 % are below", p90],
                        ["99 % are below", p99],
                        ["Longest", max],
                    ].map(([name, value]) =>
                        el("div", el("dt", name), el("dd", hf.duration(value))),
                    ),
                );
            }
            if (times.t.length) once("speed", body, speedChart);
        }
        body.append(made.attemptTimes, made.ranks);
        made.attemptTimes.hidden = times.attempts.length < 2;
        made.attemptTimes.refresh();
        ranks();
    }

    function speedChart() {
        return hf.makeChart({
            title: "Time per step",
            x: "time",
            canLog: true,
            height: 200,
            format: hf.duration,
            range: (plot, low, high) => [0, (high || 1) * 1.06],
            log: view.step_time.percentiles.max > 20 * view.step_time.percentiles.p50,
            series: [
                { colour: "s-other", points: 3, name: "longest" },
                { colour: "s-saving", width: 1.1, name: "99 %" },
                { colour: "s-training", name: "median" },
            ],
            data: () =>
                placed(
                    true,
                    view.step_time.t,
                    view.step_time.max,
                    view.step_time.p99,
                    view.step_time.p50,
                ),
            reading(data, at) {
                if (!hf.isNumber(at) || !hf.isNumber(data[3][at])) return "";
                return (
                    `median ${hf.duration(data[3][at])} · 99 % ${hf.duration(data[2][at])} · ` +
                    `longest ${hf.duration(data[1][at])} · ${when(data[0][at])}`
                );
            },
            summary() {
                const { p50, p90, p99, max } = view.step_time.percentiles;
                return (
                    `Time per step: median ${hf.duration(p50)}, 90 % below ${hf.duration(p90)}, ` +
                    `99 % below ${hf.duration(p99)}, longest ${hf.duration(max)}.`
                );
            },
            table: () =>
                timeTable("Step time", view.step_time.t, [
                    ["Median", view.step_time.p50, hf.duration],
                    ["99 %", view.step_time.p99, hf.duration],
                    ["Longest", view.step_time.max, hf.duration],
                ]),
        });
    }

    function ranks() {
        if (!hf.changed("ranks", [view.ranks, view.stragglers])) return;
        made.ranks.hidden = view.ranks.length < 2 && !view.stragglers.length;
        if (made.ranks.hidden) return;
        const most = largest(view.ranks.map((rank) => rank.wait_seconds || 0));
        const waits = view.ranks
            .map((rank) => rank.wait_seconds)
            .filter(hf.isNumber)
            .sort((a, b) => a - b);
        const median = waits[waits.length >> 1] || 0;
        const isWaitedFor = (rank) =>
            rank.is_straggler ||
            (view.stragglers.length > 0 &&
                hf.isNumber(rank.wait_seconds) &&
                rank.wait_seconds < median / 4);
        const strip = el("div.strip", { aria: { hidden: "true" } });
        for (const rank of view.ranks) {
            const bar = el("div", { className: isWaitedFor(rank) ? "is-straggler" : "" });
            const wait = hf.isNumber(rank.wait_seconds)
                ? hf.duration(rank.wait_seconds)
                : "unknown";
            bar.title = `rank ${rank.rank}${rank.host ? ` on ${rank.host}` : ""}: waits ${wait} a step`;
            bar.style.height = 4 + (most ? (44 * (rank.wait_seconds || 0)) / most : 0) + "px";
            strip.append(
                el(
                    "div",
                    { className: isWaitedFor(rank) ? "is-waited-for" : "" },
                    el("i"),
                    bar,
                    (view.ranks.length <= 32 || isWaitedFor(rank)) &&
                        el("span", String(rank.rank)),
                ),
            );
        }
        const table = hf.folded("Ranks as a table", () =>
            hf.table(
                "Ranks",
                [
                    ["Rank", "num", (rank) => hf.whole(rank.rank)],
                    ["Host", "", (rank) => rank.host || "–"],
                    ["Step", "num", (rank) => hf.whole(rank.step)],
                    ["Waits per step", "num", (rank) => hf.duration(rank.wait_seconds)],
                    ["Share of the step", "num", (rank) => hf.percent(rank.share)],
                    ["Note", "", (rank) => (isWaitedFor(rank) ? "the others wait for it" : "")],
                ],
                view.ranks,
            ),
        );
        const words =
            `How long each rank waits for the others in a step, up to ${hf.duration(most)}. ` +
            "One that never waits is the one waited for.";
        made.ranks.replaceChildren(
            el("h3", "Ranks"),
            ...view.stragglers.map((text) => el("p.notice.is-warn", hf.capital(text))),
            ...(most ? [el("p.small.muted", words), strip] : []),
            table,
        );
    }

    function memory() {
        const held = view.memory;
        id("memory").hidden = !held.t.length;
        if (!held.t.length) return;
        hf.say(id("memory-words"), held.limit_name ? `Against ${held.limit_name}.` : "");
        once("memory", id("memory-body"), memoryChart);
    }

    function memoryChart() {
        const column = (name) => view.memory[name] || [];
        const hasGpu = column("gpu").some(hf.isNumber);
        const hasOwn = column("run").some(hf.isNumber);
        const top = () => largest(column("used"));
        const limit = () => largest(column("limit"));
        // A limit far above would press the curve to the floor; it is said instead.
        const isNear = () => limit() > 0 && top() > limit() * 0.2;
        return hf.makeChart({
            title: "Memory in use",
            x: "time",
            height: 190,
            format: hf.size,
            incrs: BYTE_SIZES,
            range: () => [
                0,
                Math.max(1, isNear() ? limit() : 0, top(), largest(column("gpu"))) * 1.08,
            ],
            series: [
                {
                    colour: "bad",
                    width: 1.4,
                    dash: [6, 4],
                    name: isNear() ? "limit" : "limit, far above",
                },
                ...(hasOwn ? [{ colour: "s-training", width: 2, name: "this run" }] : []),
                {
                    colour: hasOwn ? "s-other" : "s-training",
                    width: hasOwn ? 1.2 : undefined,
                    name: `in use, of ${view.memory.limit_name.replace(/^the (limit|memory) of /, "") || "this run"}`,
                },
                ...(hasGpu ? [{ colour: "s-phase", width: 1.3, name: "GPU" }] : []),
            ],
            data: () =>
                placed(
                    true,
                    view.memory.t,
                    isNear() ? column("limit") : [],
                    ...(hasOwn ? [column("run")] : []),
                    column("used"),
                    ...(hasGpu ? [column("gpu")] : []),
                ),
            reading(data, at) {
                // This run first; how full the machine is, is another matter.
                const own = column(hasOwn ? "run" : "used");
                const known = hf.isNumber(at) && hf.isNumber(data[2][at]);
                const value = known ? data[2][at] : own.filter(hf.isNumber).pop();
                if (!hf.isNumber(value)) return "";
                const most = limit();
                return (
                    `${hf.size(value)}${most ? ` · ${hf.percent(value / most)} of ${hf.size(most)}` : ""}` +
                    (known ? ` · ${when(data[0][at])}` : "")
                );
            },
            summary: () =>
                `Memory: at most ${hf.size(top())} in use` +
                (limit() ? ` of a limit of ${hf.size(limit())}.` : ", no limit known."),
            table: () =>
                timeTable("Memory", view.memory.t, [
                    ...(hasOwn ? [["This run", column("run"), hf.size]] : []),
                    ["In use", column("used"), hf.size],
                    ["Limit", column("limit"), hf.size],
                    ...(hasGpu ? [["GPU", column("gpu"), hf.size]] : []),
                ]),
        });
    }

    function checkpoints() {
        const all = view.checkpoints;
        id("checkpoints").hidden = !all.length;
        if (!all.length) return;
        const last = all[all.length - 1];
        hf.say(
            id("checkpoints-words"),
            `${hf.plural(all.length, "checkpoint")}; the newest, step ` +
                `${hf.whole(last.step)}, at ${hf.moment(last.t)}.`,
        );
        const body = id("checkpoints-body");
        if (!made.pair) {
            made.pair = el("div.charts");
            body.append(made.pair);
        }
        const rows = () => [...view.checkpoints].reverse().slice(0, 500);
        const table = () =>
            hf.table(
                "Checkpoints, newest first",
                [
                    ["Step", "num", (each) => hf.whole(each.step)],
                    ["When", "", (each) => hf.moment(each.t)],
                    ["Why", "", (each) => each.reason],
                    ["Size", "num", (each) => hf.size(each.size_bytes)],
                    ["Written", "num", (each) => hf.size(each.written_bytes)],
                    ["Took", "num", (each) => hf.duration(each.seconds)],
                    ["Attempt", "num", (each) => hf.whole(each.attempt)],
                    ["Kept", "", (each) => (each.is_kept ? "yes" : "no")],
                ],
                rows(),
            );
        const column = (key) => view.checkpoints.map((each) => each[key]);
        const numbers = (key) => column(key).filter(hf.isNumber);
        const dots = (key, title, format, more) =>
            hf.makeChart({
                title,
                x: "time",
                height: 150,
                format,
                incrs: more.incrs,
                range: (plot, low, high) => [0, Math.max(high || 0, more.least) * 1.1],
                series: more.series,
                data: () => placed(false, column("t"), ...more.keys.map(column)),
                reading(data, at) {
                    const each = hf.isNumber(at)
                        ? view.checkpoints[at]
                        : view.checkpoints[view.checkpoints.length - 1];
                    return each
                        ? `${format(each[key])} · step ${hf.whole(each.step)}${each.reason ? ` · ${each.reason}` : ""}`
                        : "";
                },
                summary: () =>
                    `${title}: ${numbers(key).length} known, at most ${format(largest(numbers(key)))}.`,
                table,
            });
        once("sizes", made.pair, () =>
            dots("size_bytes", "Size", hf.size, {
                incrs: BYTE_SIZES,
                least: 1,
                keys: ["size_bytes", "written_bytes"],
                series: [
                    { colour: "s-saving", points: 5, name: "state" },
                    { colour: "s-other", points: 4, name: "written" },
                ],
            }),
        );
        once("seconds", made.pair, () =>
            dots("seconds", "Time to write", hf.duration, {
                least: 1e-3,
                keys: ["seconds"],
                series: [{ colour: "s-saving", points: 5, name: "each checkpoint" }],
            }),
        );
    }

    const GPU_CHARTS = [
        ["busy", "Busy", (value) => `${Math.round(value)} %`, () => 100],
        ["used", "Memory of this run", hf.size, () => view.gpus.total || 0],
        ["watts", "Power", (value) => `${Math.round(value)} W`, () => 0],
        ["celsius", "Temperature", (value) => `${Math.round(value)} °C`, () => 0],
    ];

    const known = (key) => view.gpus[key].filter(hf.isNumber);
    const highest = (key) => largest(known(key));

    function gpuChart(key, title, format, limit) {
        return hf.makeChart({
            title,
            x: "time",
            height: 150,
            format,
            range: () => [0, Math.max(limit() <= 100 ? limit() : 0, highest(key) * 1.1, 1)],
            series: [{ colour: "s-training" }],
            data: () => placed(true, view.gpus.t, view.gpus[key]),
            reading(data, at) {
                const isRead = hf.isNumber(at) && hf.isNumber(data[1][at]);
                const value = isRead ? data[1][at] : known(key).pop();
                if (!hf.isNumber(value)) return "";
                const of = limit() > 100 ? ` of ${format(limit())}` : "";
                const moment = isRead ? ` · ${when(data[0][at])}` : "";
                return `${format(value)}${of}${moment}`;
            },
            summary: () => `${title} of the GPUs: at most ${format(highest(key))}.`,
            table: () => timeTable(title, view.gpus.t, [[title, view.gpus[key], format]]),
        });
    }

    function gpus() {
        const shown = view.gpus ? GPU_CHARTS.filter(([key]) => known(key).length) : [];
        id("gpus").hidden = !shown.length;
        const words = "All GPUs of this run together; the temperature is of the hottest.";
        hf.say(id("gpus-words"), words);
        for (const [key, ...rest] of shown) {
            once(`gpu ${key}`, id("gpus-body"), () => gpuChart(key, ...rest));
        }
    }

    hf.resources = function (next) {
        view = next;
        speed();
        memory();
        gpus();
        checkpoints();
    };
})(holdfast);
