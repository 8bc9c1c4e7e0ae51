/* Metrics over steps: steps that count in full colour, repeated steps faintly. */
(function (hf) {
    "use strict";
    const { el, id } = hf;
    const held = new Map();
    let attempts = [];
    let filter = "";

    /** Where attempts ended: [step, tone, words]. A run that ended well was not interrupted. */
    function interruptions() {
        return attempts
            .filter(
                (each, index) =>
                    hf.isNumber(each.last_step) &&
                    (index < attempts.length - 1 || hf.tone(each.outcome) === "bad"),
            )
            .map((each) => [
                each.last_step,
                hf.tone(each.outcome),
                `attempt ${each.number} ${each.outcome}`,
            ]);
    }

    function columns(metric, log) {
        const xs = [];
        const ys = [];
        let last = -Infinity;
        metric.step.forEach((step, index) => {
            if (!hf.isNumber(step) || step <= last) return;
            last = step;
            const value = metric.value[index];
            xs.push(step);
            ys.push(hf.isNumber(value) && !(log && value <= 0) ? value : null);
        });
        // The axis reaches as far as training ever went, also where that was lost.
        const far = metric.lost.step.reduce((most, step) => (step > most ? step : most), -Infinity);
        if (far > last) {
            xs.push(far);
            ys.push(null);
        }
        return [xs, ys];
    }

    function trace(plot, context, steps, values, isLog) {
        let isOn = false;
        context.beginPath();
        steps.forEach((step, index) => {
            const value = values[index];
            if (!hf.isNumber(step) || !hf.isNumber(value) || (isLog && value <= 0)) {
                isOn = false;
                return;
            }
            const x = plot.valToPos(step, "x", true);
            const y = plot.valToPos(value, "y", true);
            if (isOn) context.lineTo(x, y);
            else context.moveTo(x, y);
            isOn = true;
        });
        context.stroke();
    }

    function under(metric, plot, context, isLog) {
        const scale = window.devicePixelRatio || 1;
        // Between the lowest and the highest of what one point stands for.
        context.fillStyle = hf.colour("s-training");
        context.globalAlpha = 0.18;
        let run = [];
        const flush = () => {
            if (run.length > 1) {
                context.beginPath();
                run.forEach(([x, low]) => context.lineTo(x, low));
                run.reverse().forEach(([x, , high]) => context.lineTo(x, high));
                context.fill();
            }
            run = [];
        };
        metric.step.forEach((step, index) => {
            const low = metric.low[index];
            const high = metric.high[index];
            if (!hf.isNumber(low) || !hf.isNumber(high) || (isLog && low <= 0)) flush();
            else
                run.push([
                    plot.valToPos(step, "x", true),
                    plot.valToPos(low, "y", true),
                    plot.valToPos(high, "y", true),
                ]);
        });
        flush();
        context.globalAlpha = 0.75;
        context.strokeStyle = hf.colour("s-lost");
        context.lineWidth = 1 * scale;
        context.setLineDash([3 * scale, 2 * scale]);
        trace(plot, context, metric.lost.step, metric.lost.value, isLog);
        context.setLineDash([]);
        context.globalAlpha = 1;
    }

    function over(metric, plot, context) {
        const scale = window.devicePixelRatio || 1;
        const { left, top, width, height } = plot.bbox;
        const marks = interruptions();
        context.lineWidth = scale;
        for (const [step, tone] of marks) {
            const x = Math.round(plot.valToPos(step, "x", true)) + 0.5;
            context.strokeStyle = hf.colour(tone === "bad" ? "bad" : "edge");
            context.setLineDash(tone === "bad" ? [] : [2 * scale, 3 * scale]);
            context.globalAlpha = marks.length > 15 ? 0.22 : 0.36;
            context.beginPath();
            context.moveTo(x, top);
            context.lineTo(x, top + height);
            context.stroke();
            // A cap at the top says it loudly; the line below stays behind the curve.
            context.globalAlpha = 1;
            context.fillStyle = context.strokeStyle;
            context.fillRect(x - scale, top, 2 * scale, 6 * scale);
        }
        context.setLineDash([]);
        context.strokeStyle = hf.colour("bad");
        context.lineWidth = 1.6 * scale;
        for (const step of metric.bad) {
            const y = top + 6 * scale;
            const r = 3.5 * scale;
            // The value that ended a run stands at the very edge, and is to be seen whole.
            const at = plot.valToPos(step, "x", true);
            if (at < left - 1 || at > left + width + 1) continue;
            const x = Math.min(left + width - r, Math.max(left + r, at));
            context.beginPath();
            context.moveTo(x - r, y - r);
            context.lineTo(x + r, y + r);
            context.moveTo(x + r, y - r);
            context.lineTo(x - r, y + r);
            context.stroke();
        }
    }

    function newest(metric) {
        for (let at = metric.value.length - 1; at >= 0; at -= 1) {
            if (hf.isNumber(metric.value[at])) return at;
        }
        return -1;
    }

    function extremes(metric) {
        let low = Infinity;
        let high = -Infinity;
        metric.value.forEach((value, index) => {
            if (!hf.isNumber(value)) return;
            low = Math.min(low, hf.isNumber(metric.low[index]) ? metric.low[index] : value);
            high = Math.max(high, hf.isNumber(metric.high[index]) ? metric.high[index] : value);
        });
        return [low, high];
    }

    function make(name) {
        let metric = held.get(name).metric;
        const now = () => (metric = held.get(name).metric);
        const isFinite = () =>
            metric.bad.length ? ` · ${hf.plural(metric.bad.length, "value")} not finite` : "";
        return hf.makeChart({
            title: name,
            x: "step",
            canLog: true,
            format: hf.number,
            series: [{ colour: "s-training" }],
            data: (log) => columns(now(), log),
            under: (plot, context, chart) => under(metric, plot, context, chart.isLog),
            over: (plot, context) => over(metric, plot, context),
            reading(data, index) {
                if (hf.isNumber(index) && hf.isNumber(data[1][index])) {
                    const step = data[0][index];
                    const at = metric.step.indexOf(step);
                    return `${hf.number(data[1][index])} · step ${hf.whole(step)} · attempt ${metric.attempt[at]}`;
                }
                const last = newest(metric);
                if (last < 0) return `no finite value${isFinite()}`;
                return `${hf.number(metric.value[last])} at step ${hf.whole(metric.step[last])}${isFinite()}`;
            },
            summary() {
                const last = newest(now());
                if (last < 0) return `${name}: no finite value.`;
                const [low, high] = extremes(metric);
                return (
                    `${name}: newest value ${hf.number(metric.value[last])} at step ${metric.step[last]}, ` +
                    `between ${hf.number(low)} and ${hf.number(high)} over ${metric.step.length} points, ` +
                    `${hf.plural(interruptions().length, "interruption")}${isFinite()}.`
                );
            },
            table() {
                const stride = Math.ceil(now().step.length / 200) || 1;
                const rows = metric.step
                    .map((step, index) => index)
                    .filter((index) => index % stride === 0 || index === metric.step.length - 1)
                    .reverse();
                return hf.table(
                    `${name}, newest first`,
                    [
                        ["Step", "num", (at) => hf.whole(metric.step[at])],
                        ["Value", "num", (at) => hf.number(metric.value[at])],
                        ["Lowest", "num", (at) => hf.number(metric.low[at])],
                        ["Highest", "num", (at) => hf.number(metric.high[at])],
                        ["Attempt", "num", (at) => hf.whole(metric.attempt[at])],
                    ],
                    rows,
                );
            },
        });
    }

    function sift() {
        for (const [name, { chart }] of held) {
            chart.box.hidden = !name.toLowerCase().includes(filter);
        }
    }

    function tools() {
        const box = id("metrics-tools");
        if (held.size <= 6 || box.firstChild) return;
        box.append(
            el("input.field", {
                type: "search",
                placeholder: "Filter by name",
                aria: { label: "Filter metrics by name" },
                on: {
                    input: (event) => {
                        filter = event.target.value.trim().toLowerCase();
                        sift();
                    },
                },
            }),
        );
    }

    hf.metrics = function (view) {
        id("metrics").hidden = !view.metrics.length;
        attempts = view.attempts;
        const body = id("metrics-body");
        const names = new Set(view.metrics.map((metric) => metric.name));
        for (const [name, entry] of held) {
            if (names.has(name)) continue;
            entry.chart.discard();
            held.delete(name);
        }
        for (const metric of view.metrics) {
            const entry = held.get(metric.name);
            const size = [
                metric.step.length,
                metric.step[metric.step.length - 1],
                metric.bad.length,
                metric.lost.step.length,
                attempts.length,
            ].join();
            if (entry) {
                entry.metric = metric;
                if (entry.size !== size) entry.chart.update();
                entry.size = size;
                continue;
            }
            held.set(metric.name, { metric, size });
            const chart = make(metric.name);
            held.get(metric.name).chart = chart;
            body.append(chart.box);
        }
        tools();
        sift();
    };
})(holdfast);
