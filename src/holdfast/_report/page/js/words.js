/* Numbers, times and elements. Every string of a run reaches the page through textContent. */
const holdfast = {};

(function (hf) {
    "use strict";

    /** The element "tag.class"; then its properties, if any (`data` and `aria` are maps, `on` has
      listeners), and its children: text is text. */
    hf.el = function (tag, ...children) {
        const [kind, ...classes] = tag.split(".");
        const node = document.createElement(kind);
        if (classes.length) node.className = classes.join(" ");
        const hasProps = children[0] && children[0].constructor === Object;
        for (const [name, value] of Object.entries(hasProps ? children.shift() : {})) {
            if (value === undefined || value === null) continue;
            if (name === "data") Object.assign(node.dataset, value);
            else if (name === "aria") {
                for (const [key, text] of Object.entries(value))
                    node.setAttribute("aria-" + key, text);
            } else if (name === "on") {
                for (const [key, act] of Object.entries(value)) node.addEventListener(key, act);
            } else if (name === "role" || name === "scope") node.setAttribute(name, value);
            else node[name] = value;
        }
        for (const child of children.flat()) {
            if (child !== null && child !== undefined && child !== false) node.append(child);
        }
        return node;
    };

    /** A small button; `label` is for a screen reader, where the text alone says too little. */
    hf.button = (text, label, act, classes = "") =>
        hf.el(
            `button.button.is-small${classes}`,
            { type: "button", aria: label ? { label } : {}, on: { click: act } },
            text,
        );

    hf.id = (name) => document.getElementById(name);

    /** Text that is set only when it differs: a screen reader announces changes, not polls. */
    hf.say = function (node, text) {
        if (node.textContent !== text) node.textContent = text;
    };

    hf.isNumber = (value) => typeof value === "number" && Number.isFinite(value);

    const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
    hf.whole = (value) => (hf.isNumber(value) ? whole.format(value) : "–");

    /** A metric in few digits. */
    hf.number = function (value) {
        if (!hf.isNumber(value)) return "–";
        const size = Math.abs(value);
        if (size !== 0 && (size < 1e-3 || size >= 1e7)) {
            return value
                .toExponential(2)
                .replace(/\.?0+e/, "e")
                .replace("e+", "e");
        }
        if (size >= 10000) return whole.format(value);
        return String(Number(value.toPrecision(4)));
    };

    hf.percent = function (share) {
        if (!hf.isNumber(share)) return "–";
        const value = share * 100;
        if (value > 0 && value < 0.1) return "< 0.1 %";
        if (value < 100 && value > 99.9) return "> 99.9 %";
        return (
            (value < 9.95 || value > 99 ? value.toFixed(1).replace(/\.0$/, "") : value.toFixed(0)) +
            " %"
        );
    };

    const pairs = [
        ["d", 86400, "h", 3600],
        ["h", 3600, "min", 60],
        ["min", 60, "s", 1],
    ];

    /** Two units at most: 3 d 4 h, 2 min 5 s, 12 min, 0.52 s, 31 ms. */
    hf.duration = function (seconds) {
        if (!hf.isNumber(seconds)) return "–";
        if (seconds < 0) return "−" + hf.duration(-seconds);
        for (const [big, size, small, part] of pairs) {
            // What rounds up to the next unit belongs to it: 60 min is an hour.
            if (Math.round(seconds / part) * part < size) continue;
            const parts = Math.round(seconds / part);
            const whole = Math.floor((parts * part) / size);
            if (big === "min" && whole >= 10) return `${Math.round(seconds / 60)} min`;
            const rest = parts - (whole * size) / part;
            return rest ? `${whole} ${big} ${rest} ${small}` : `${whole} ${big}`;
        }
        if (seconds >= 9.95) return `${Math.round(seconds)} s`;
        if (seconds >= 0.9995) return `${Number(seconds.toFixed(1))} s`;
        if (seconds >= 0.1) return `${Number(seconds.toFixed(2))} s`;
        if (seconds >= 0.001) return `${Number((seconds * 1e3).toPrecision(2))} ms`;
        if (seconds === 0) return "0 s";
        return `${Number((seconds * 1e6).toPrecision(2))} µs`;
    };

    hf.size = function (bytes) {
        if (!hf.isNumber(bytes)) return "–";
        // As the command line and the sentences have them.
        const names = ["B", "kB", "MB", "GB", "TB", "PB"];
        let value = bytes;
        let at = 0;
        while (Math.abs(value) >= 1000 && at < names.length - 1) {
            value /= 1000;
            at += 1;
        }
        return `${at === 0 ? value : Number(value.toPrecision(3))} ${names[at]}`;
    };

    const two = (value) => String(value).padStart(2, "0");
    const months = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(" ");
    hf.day = function (t) {
        const date = new Date(t * 1000);
        return `${date.getDate()} ${months[date.getMonth()]}`;
    };
    hf.clock = function (t, seconds) {
        const date = new Date(t * 1000);
        const minutes = `${two(date.getHours())}:${two(date.getMinutes())}`;
        return seconds ? `${minutes}:${two(date.getSeconds())}` : minutes;
    };
    hf.moment = function (t) {
        if (!hf.isNumber(t)) return "–";
        const date = new Date(t * 1000);
        const far = Math.abs(Date.now() - date) > 300 * 86400e3 ? ` ${date.getFullYear()}` : "";
        return `${hf.day(t)}${far} ${hf.clock(t, true)}`;
    };

    hf.plural = (count, one, many) => `${hf.whole(count)} ${count === 1 ? one : many || one + "s"}`;

    hf.joined = (parts, between = " · ") => parts.filter(Boolean).join(between);

    hf.capital = (text) => (text ? text[0].toUpperCase() + text.slice(1) : "");

    /** Asks again and again: `ask` returns how long to wait then. Returns a function that asks now,
      as a page does that is shown again. */
    hf.repeat = function (ask) {
        let timer = null;
        let isAsking = false;
        let isDue = false;
        async function now() {
            clearTimeout(timer);
            isDue = true;
            if (isAsking) return;
            isAsking = true;
            let wait = 0;
            while (isDue) {
                isDue = false;
                wait = await ask();
            }
            isAsking = false;
            timer = setTimeout(now, wait);
        }
        document.addEventListener("visibilitychange", () => {
            if (!document.hidden) now();
        });
        return now;
    };

    /** Same value as last time? Kept per name, so that a poll touches only what has changed. */
    const seen = new Map();
    hf.changed = function (name, value) {
        const text = JSON.stringify(value) || "";
        if (seen.get(name) === text) return false;
        seen.set(name, text);
        return true;
    };

    /** A value as Python writes it. */
    hf.pythonText = function (value) {
        if (value === undefined) return "";
        if (value === null) return "None";
        if (typeof value === "boolean") return value ? "True" : "False";
        return typeof value === "number" ? hf.number(value) : String(value);
    };

    /** A table; columns: [title, class, cell of a row], the first cell heads its row. */
    hf.table = function (caption, columns, rows) {
        const head = hf.el(
            "tr",
            columns.map(([title, css]) =>
                hf.el("th", { scope: "col", className: css || "" }, title),
            ),
        );
        const body = hf.el("tbody");
        for (const row of rows) {
            body.append(
                hf.el(
                    "tr",
                    columns.map(([, css, cell], index) => {
                        const held = cell(row);
                        const props = { className: css || "" };
                        if (index === 0) return hf.el("th", { ...props, scope: "row" }, held);
                        return hf.el("td", props, held);
                    }),
                ),
            );
        }
        return hf.el("table.data", hf.el("caption.sr-only", caption), hf.el("thead", head), body);
    };

    /** What stands behind a summary, made when it is first opened and again when it has changed. */
    hf.folded = function (title, make) {
        const inside = hf.el("div.scroll", { tabIndex: 0, role: "group" });
        inside.setAttribute("aria-label", title);
        const box = hf.el("details.folded", hf.el("summary", title), inside);
        let stale = true;
        box.refresh = function () {
            stale = true;
            if (!box.open) return;
            inside.replaceChildren(make());
            stale = false;
        };
        box.addEventListener("toggle", () => {
            if (box.open && stale) box.refresh();
        });
        return box;
    };
})(holdfast);
