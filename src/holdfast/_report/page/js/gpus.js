/* The GPUs of the run over time: how busy they are, their memory, power and temperature. */
(function (hf) {
    "use strict";
    const { id } = hf;
    const made = new Map();
    let view = null;

    const CHARTS = [
        ["busy", "Busy", (value) => `${Math.round(value)} %`, () => 100],
        ["used", "Memory of this run", hf.size, () => view.gpus.total || 0],
        ["watts", "Power", (value) => `${Math.round(value)} W`, () => 0],
        ["celsius", "Temperature", (value) => `${Math.round(value)} °C`, () => 0],
    ];

    const known = (key) => view.gpus[key].filter(hf.isNumber);
    const highest = (key) => known(key).reduce((most, value) => Math.max(most, value), 0);

    function make(key, title, format, limit) {
        return hf.makeChart({
            title,
            x: "time",
            height: 150,
            format,
            range: () => [0, Math.max(limit() <= 100 ? limit() : 0, highest(key) * 1.1, 1)],
            series: [{ colour: "s-training" }],
            data: () => hf.placed(true, view.gpus.t, view.gpus[key]),
            reading(data, at) {
                const isRead = hf.isNumber(at) && hf.isNumber(data[1][at]);
                const value = isRead ? data[1][at] : known(key).pop();
                if (!hf.isNumber(value)) return "";
                const of = limit() > 100 ? ` of ${format(limit())}` : "";
                const when = isRead ? ` · ${hf.moment(hf.span.axis.from(data[0][at]))}` : "";
                return `${format(value)}${of}${when}`;
            },
            summary: () => `${title} of the GPUs: at most ${format(highest(key))}.`,
            table: () => hf.timeTable(title, view.gpus.t, [[title, view.gpus[key], format]]),
        });
    }

    hf.gpus = function (next) {
        view = next;
        const shown = view.gpus ? CHARTS.filter(([key]) => known(key).length) : [];
        id("gpus").hidden = !shown.length;
        if (!shown.length) return;
        hf.say(
            id("gpus-words"),
            "All GPUs of this run together; the temperature is of the hottest.",
        );
        for (const [key, ...rest] of shown) {
            if (made.has(key)) made.get(key).update();
            else {
                made.set(key, make(key, ...rest));
                id("gpus-body").append(made.get(key).box);
            }
        }
    };
})(holdfast);
