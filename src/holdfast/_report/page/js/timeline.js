/* The timeline: what it is made of, what it shows now, how it is moved, and how it follows a live
   run. */
(function (hf) {
    "use strict";
    const { el, id } = hf;

    // The stretch of time that is looked at; the charts over time show the same one.
    hf.span = { axis: null, from: 0, to: 1, watchers: [] };

    const state = {
        view: null,
        axis: null,
        from: 0,
        to: 1,
        lanes: [],
        shown: [],
        marks: [],
        ticks: [],
        hidden: new Set(),
        chosen: null,
        lane: null,
        folded: null,
        width: 0,
        gutter: 34,
        height: 0,
        rowHeight: 0,
    };

    function measure() {
        state.width = state.box.clientWidth;
        state.gutter = state.width < 520 ? 26 : 34;
        const count = Math.max(1, state.lanes.length);
        const each = count <= 6 ? 34 : count <= 14 ? 28 : count <= 24 ? 22 : count <= 48 ? 16 : 9;
        // A canvas has a largest height; 1,500 rows are below it on any screen.
        state.height = Math.min(count * each, 13500 / (window.devicePixelRatio || 1)) + 4;
        const length = state.axis.length;
        const within = (lane) =>
            state.axis.to(lane.to) >= state.from && state.axis.to(lane.from) <= state.to;
        state.shown =
            state.from <= 0 && state.to >= length ? state.lanes : state.lanes.filter(within);
        state.rowHeight = Math.min(34, (state.height - 4) / Math.max(1, state.shown.length));
        const room = (state.width - state.gutter) / 74;
        state.ticks = hf.ticks(state.axis, state.from, state.to, room);
    }

    let asked = false;
    function draw() {
        asked = false;
        if (!state.view || !state.lanes.length) return;
        measure();
        if (state.width < 50) return;
        hf.paintTop(state);
        hf.paintRows(state);
        state.whole.disabled = state.from <= 0 && state.to >= state.axis.length;
    }
    function drawSoon() {
        if (asked) return;
        asked = true;
        requestAnimationFrame(draw);
    }

    function place(node, x, y) {
        const room = state.box.clientWidth;
        node.hidden = false;
        const width = node.offsetWidth;
        const left = Math.min(room - width - 4, Math.max(4, x + 14));
        node.style.left =
            (x + 14 + width > room && x - width - 14 > 0 ? x - width - 14 : left) + "px";
        const base = state.rows.offsetTop - state.rows.scrollTop;
        node.style.top = base + y + 18 + "px";
    }

    const act = {
        show(lines, x, y) {
            state.tip.replaceChildren(
                ...lines.map(([title, text, where]) =>
                    el(
                        "div",
                        title ? el("strong", title) : null,
                        text ? el("p", text) : null,
                        el("p.muted", where),
                    ),
                ),
            );
            place(state.tip, x, y);
        },
        hide() {
            state.tip.hidden = true;
        },
        zoom(from, to) {
            const length = state.axis.length;
            const least = Math.min(length, Math.max(length / 50000, 2));
            const middle = (from + to) / 2;
            const size = Math.min(length, Math.max(least, to - from));
            state.from = Math.min(
                length - size,
                Math.max(0, to - from < least ? middle - size / 2 : from),
            );
            state.to = state.from + size;
            Object.assign(hf.span, { axis: state.axis, from: state.from, to: state.to });
            drawSoon();
            for (const watcher of hf.span.watchers) watcher();
        },
        scale(factor, share) {
            const size = state.to - state.from;
            let fix = share;
            if (fix === null) {
                const at = state.chosen ? state.axis.to(state.chosen.event.t) : NaN;
                fix = at >= state.from && at <= state.to ? (at - state.from) / size : 0.5;
            }
            const next = Math.min(state.axis.length, size * factor);
            act.zoom(state.from + fix * (size - next), state.from + fix * (size - next) + next);
        },
        pan(share) {
            const size = state.to - state.from;
            const from = Math.min(state.axis.length - size, Math.max(0, state.from + share * size));
            act.zoom(from, from + size);
        },
        choose(mark, lane) {
            state.chosen = mark;
            state.lane = lane;
            drawSoon();
        },
        reveal(lines) {
            const mark = state.chosen;
            const at = state.axis.to(mark ? mark.event.t : state.lane.attempt.start);
            const size = state.to - state.from;
            if (at < state.from || at > state.to) act.zoom(at - size / 2, at + size / 2);
            measure();
            const wide = state.width - state.gutter - hf.TOP.right;
            const x = state.gutter + ((at - state.from) / size) * wide;
            const y = (state.shown.indexOf(state.lane) + 0.5) * state.rowHeight;
            if (y < state.rows.scrollTop || y > state.rows.scrollTop + state.rows.clientHeight) {
                state.rows.scrollTop = y - state.rows.clientHeight / 2;
            }
            act.show([lines], x, y);
            hf.say(state.spoken, lines.filter(Boolean).join(". "));
        },
        step(by) {
            const marks = hf.inOrder(state.lanes, state.hidden);
            if (!marks.length) return;
            const now = state.chosen ? marks.indexOf(state.chosen) : -1;
            // The first key press takes what is in sight, not what lies far outside it.
            const sight = marks.findIndex((mark) => state.axis.to(mark.event.t) >= state.from);
            const wish = now < 0 && Math.abs(by) === 1 ? Math.max(0, sight) : now + by;
            const next = Math.min(marks.length - 1, Math.max(0, wish));
            act.choose(marks[next], marks[next].lane);
            act.reveal(hf.eventLines(marks[next].event));
        },
        stepLane(by) {
            const now = state.lanes.indexOf(state.lane);
            const next = state.lanes[Math.min(state.lanes.length - 1, Math.max(0, now + by))];
            act.choose(null, next);
            act.reveal(hf.attemptLines(next.attempt));
        },
        zoomLane() {
            const lane = state.lane;
            if (!lane) return;
            const from = state.axis.to(lane.attempt.start);
            const to = state.axis.to(lane.to);
            act.zoom(from - (to - from) * 0.04, to + (to - from) * 0.04);
        },
    };

    // -- pointer, wheel and keys: nothing here is reachable by the pointer alone -------------

    /** What lies under a point of the rows: marks close by, else a stretch of time. */
    function under(x, y) {
        const lane = state.shown[Math.floor(y / state.rowHeight)];
        if (!lane) return null;
        const wide = state.width - state.gutter - hf.TOP.right;
        const scale = (state.to - state.from) / wide;
        const place = state.from + (x - state.gutter) * scale;
        const near = lane.events
            .filter((mark) => !state.hidden.has(mark.group))
            .map((mark) => ({ mark, far: Math.abs(state.axis.to(mark.event.t) - place) / scale }))
            .filter((each) => each.far <= 7)
            .sort(
                (a, b) =>
                    Boolean(a.mark.isQuiet) - Boolean(b.mark.isQuiet) ||
                    hf.GROUPS[b.mark.group][2] - hf.GROUPS[a.mark.group][2] ||
                    a.far - b.far,
            )
            .map((each) => each.mark);
        const segment = x >= state.gutter ? hf.segmentAt(lane, state.axis.from(place)) : null;
        return { lane, marks: near, segment, place };
    }

    function tell(found) {
        if (!found) return null;
        if (found.marks.length) {
            const shown = found.marks.slice(0, 4).map((mark) => hf.eventLines(mark.event));
            const more = found.marks.length - shown.length;
            if (more > 0)
                shown.push(["", "", `and ${hf.plural(more, "more event")} here; zoom in`]);
            return shown;
        }
        if (found.segment) return [hf.segmentLines(found.segment)];
        return [hf.attemptLines(found.lane.attempt)];
    }

    function takeHands() {
        const { canvas, top, box } = state;
        let drag = null;
        const at = (event, node) => {
            const area = node.getBoundingClientRect();
            return [event.clientX - area.left, event.clientY - area.top];
        };
        const inside = (x) => Math.min(state.width - hf.TOP.right, Math.max(state.gutter, x));
        const share = (x) =>
            (inside(x) - state.gutter) / (state.width - state.gutter - hf.TOP.right);
        const placeAt = (x) => state.from + share(x) * (state.to - state.from);

        function rubber(x0, x1) {
            state.rubber.hidden = Math.abs(x1 - x0) < 4;
            state.rubber.style.left = Math.min(x0, x1) + "px";
            state.rubber.style.width = Math.abs(x1 - x0) + "px";
        }

        canvas.addEventListener("pointerdown", (event) => {
            if (event.button !== 0) return;
            const [x] = at(event, canvas);
            drag = { kind: "select", x: inside(x) };
            canvas.setPointerCapture(event.pointerId);
        });
        canvas.addEventListener("pointermove", (event) => {
            const [x, y] = at(event, canvas);
            if (drag) {
                act.hide();
                rubber(drag.x, inside(x));
                return;
            }
            const found = under(x, y);
            canvas.style.cursor = found && found.marks.length ? "pointer" : "crosshair";
            const lines = tell(found);
            if (lines) act.show(lines, x, y);
            else act.hide();
        });
        canvas.addEventListener("pointerleave", () => {
            if (!drag) act.hide();
        });
        canvas.addEventListener("pointerup", (event) => {
            if (!drag) return;
            const [x, y] = at(event, canvas);
            const from = drag.x;
            drag = null;
            rubber(0, 0);
            if (Math.abs(inside(x) - from) >= 5) {
                const ends = [placeAt(from), placeAt(x)].sort((a, b) => a - b);
                act.zoom(ends[0], ends[1]);
                return;
            }
            const found = under(x, y);
            if (!found) return;
            act.choose(found.marks[0] || null, found.lane);
            act.show(tell(found), x, y);
        });
        canvas.addEventListener("pointercancel", () => {
            drag = null;
            rubber(0, 0);
        });
        canvas.addEventListener("dblclick", () => act.zoom(0, state.axis.length));

        // The overview: drag the window about, or draw a new one.
        let hold = null;
        top.addEventListener("pointerdown", (event) => {
            const [x, y] = at(event, top);
            if (event.button !== 0 || y > hf.TOP.lane + 6) return;
            const spot = share(x) * state.axis.length;
            const zoomed = state.from > 0 || state.to < state.axis.length;
            const within = zoomed && spot >= state.from && spot <= state.to;
            hold = within ? { pan: spot - state.from } : { draw: spot };
            top.setPointerCapture(event.pointerId);
        });
        top.addEventListener("pointermove", (event) => {
            if (!hold) return;
            const spot = share(at(event, top)[0]) * state.axis.length;
            if (hold.pan !== undefined) {
                const length = state.to - state.from;
                const from = Math.min(state.axis.length - length, Math.max(0, spot - hold.pan));
                act.zoom(from, from + length);
            } else if (Math.abs(spot - hold.draw) > state.axis.length / 200) {
                act.zoom(Math.min(spot, hold.draw), Math.max(spot, hold.draw));
            }
        });
        for (const name of ["pointerup", "pointercancel"]) {
            top.addEventListener(name, () => {
                hold = null;
            });
        }
        top.addEventListener("dblclick", () => act.zoom(0, state.axis.length));

        // A plain wheel scrolls the page: only a pinch, or Ctrl or Shift held, is meant for us.
        box.addEventListener(
            "wheel",
            (event) => {
                const area = canvas.getBoundingClientRect();
                if (event.ctrlKey || event.metaKey) {
                    event.preventDefault();
                    act.scale(
                        Math.exp(Math.max(-60, Math.min(60, event.deltaY)) * 0.008),
                        share(event.clientX - area.left),
                    );
                } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY) * 2) {
                    if (state.from <= 0 && state.to >= state.axis.length) return;
                    event.preventDefault();
                    act.pan((event.deltaX || event.deltaY) / 600);
                }
            },
            { passive: false },
        );

        const keys = {
            ArrowRight: (event) => (event.shiftKey ? act.pan(0.2) : act.step(1)),
            ArrowLeft: (event) => (event.shiftKey ? act.pan(-0.2) : act.step(-1)),
            ArrowDown: () => act.stepLane(1),
            ArrowUp: () => act.stepLane(-1),
            Home: () => act.step(-Infinity),
            End: () => act.step(Infinity),
            "+": () => act.scale(0.6, null),
            "=": () => act.scale(0.6, null),
            "-": () => act.scale(1 / 0.6, null),
            0: () => act.zoom(0, state.axis.length),
            Enter: () => act.zoomLane(),
            Escape: () => act.hide(),
        };
        state.rows.addEventListener("keydown", (event) => {
            if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(keys, event.key))
                return;
            event.preventDefault();
            keys[event.key](event);
        });
        state.rows.addEventListener("blur", () => act.hide());
    }

    // -- what is drawn -------------------------------------------------------------------

    function setAxis(keep) {
        const old = state.axis;
        const full = !old || (state.from <= 0 && state.to >= old.length - 1e-6);
        const atEnd = old && state.to >= old.length - 1e-6;
        const times = old ? [old.from(state.from), old.from(state.to)] : null;
        const size = state.to - state.from;
        state.axis = hf.makeAxis(state.view, state.folded);
        if (full || !keep) act.zoom(0, state.axis.length);
        else if (atEnd) act.zoom(state.axis.length - size, state.axis.length);
        else act.zoom(state.axis.to(times[0]), state.axis.to(times[1]));
    }

    function legend() {
        const seconds = {};
        for (const { kind, start, end } of state.view.segments) {
            seconds[kind] = (seconds[kind] || 0) + end - start;
        }
        const counts = {};
        for (const { group, event, isQuiet } of state.marks) {
            if (!isQuiet) counts[group] = (counts[group] || 0) + (event.count || 1);
        }
        const kinds = Object.keys(hf.KINDS).filter((kind) => seconds[kind] > 0);
        const groups = Object.keys(hf.GROUPS).filter((group) => counts[group]);
        if (hf.changed("legend", [kinds, groups])) {
            state.kinds.replaceChildren(
                ...kinds.map((kind) =>
                    el("li", hf.swatch(kind), hf.kindName(kind)),
                ),
            );
            state.groups.replaceChildren(
                ...groups.map((group) => {
                    const canvas = el("canvas.mark", { data: { group }, aria: { hidden: "true" } });
                    const button = el(
                        "button.toggle",
                        {
                            type: "button",
                            aria: { pressed: String(!state.hidden.has(group)) },
                            on: {
                                click: () => {
                                    if (!state.hidden.delete(group)) state.hidden.add(group);
                                    button.setAttribute(
                                        "aria-pressed",
                                        String(!state.hidden.has(group)),
                                    );
                                    drawSoon();
                                },
                            },
                        },
                        canvas,
                        hf.GROUPS[group][0],
                        el("span.muted.count"),
                    );
                    return el("li", button);
                }),
            );
            paintLegend();
        }
        groups.forEach((group, index) => {
            hf.say(state.groups.children[index].querySelector(".count"), hf.whole(counts[group]));
        });
    }
    function paintLegend() {
        for (const canvas of state.groups.querySelectorAll("canvas")) {
            hf.paintMark(hf.ready(canvas, 14, 14), canvas.dataset.group, 7, 7, 4);
        }
    }

    function eventsTable() {
        const LIMIT = 1000;
        const marks = hf.inOrder(state.lanes, state.hidden, true).reverse();
        const table = hf.table(
            "Events, newest first",
            [
                ["When", "", (mark) => hf.moment(mark.event.t)],
                ["Event", "", (mark) => hf.eventLines(mark.event)[0]],
                ["Details", "", (mark) => mark.event.text || ""],
                ["Step", "num", (mark) => hf.whole(mark.event.step)],
                ["Attempt", "num", (mark) => hf.whole(mark.event.attempt)],
            ],
            marks.slice(0, LIMIT),
        );
        if (marks.length <= LIMIT) return table;
        return el(
            "div",
            table,
            el(
                "p.muted.small",
                `The newest ${hf.whole(LIMIT)} of ${hf.whole(marks.length)}; hide kinds above to see older ones.`,
            ),
        );
    }

    function build() {
        state.fold = hf.button("Fold waits", "", () => {
            state.folded = !state.folded;
            state.fold.setAttribute("aria-pressed", String(state.folded));
            setAxis(false);
        });
        state.whole = hf.button("Whole run", "", () => act.zoom(0, state.axis.length));
        const tools = el(
            "div.tools",
            state.fold,
            state.whole,
            hf.button("−", "Zoom out", () => act.scale(1 / 0.6, null)),
            hf.button("+", "Zoom in", () => act.scale(0.6, null)),
        );
        id("timeline-title").parentElement.append(tools);
        state.top = el("canvas.timeline-top", { aria: { hidden: "true" } });
        state.canvas = el("canvas.timeline-canvas", { aria: { hidden: "true" } });
        state.rubber = el("div.rubber", { hidden: true });
        state.rows = el(
            "div.timeline-rows",
            {
                tabIndex: 0,
                role: "application",
                aria: { label: "Timeline of attempts", describedby: "timeline-keys" },
            },
            el("div.timeline-sheet", state.canvas, state.rubber),
        );
        state.tip = el("div.tip", { hidden: true });
        state.spoken = el("p.sr-only", { aria: { live: "polite" } });
        state.box = el("div.timeline-box", state.top, state.rows, state.tip);
        state.kinds = el("ul.legend", { aria: { label: "Kinds of time" } });
        state.groups = el("ul.legend", { aria: { label: "Events shown" } });
        state.table = hf.folded("All events as a table", eventsTable);
        id("timeline-body").append(
            el("div.legends", state.kinds, state.groups),
            state.box,
            state.spoken,
            el(
                "p.small.muted.hint",
                { id: "timeline-keys" },
                "Drag to zoom, or Ctrl and the wheel. Keys: ← → events, ↑ ↓ attempts, + − zoom, " +
                "Shift ← → along, Enter one attempt, 0 the whole run.",
            ),
            state.table,
        );
        takeHands();
        window.addEventListener("beforeprint", draw);
        new ResizeObserver(drawSoon).observe(state.box);
        document.addEventListener("holdfast-theme", () => {
            paintLegend();
            drawSoon();
        });
    }

    const key = (mark) => mark && [mark.event.t, mark.event.kind, mark.event.title].join();
    hf.timeline = function (view) {
        id("timeline").hidden = !view.attempts.length;
        if (!view.attempts.length) return;
        if (!state.box) build();
        if (state.folded === null) state.folded = hf.worthFolding(view);
        const chosen = key(state.chosen);
        const number = state.lane && state.lane.attempt.number;
        state.view = view;
        state.lanes = hf.makeLanes(view);
        state.marks = state.lanes.flatMap((lane) => lane.events);
        state.chosen = chosen ? state.marks.find((mark) => key(mark) === chosen) || null : null;
        state.lane = state.lanes.find((lane) => lane.attempt.number === number) || null;
        state.fold.hidden = !hf.canFold(view);
        state.fold.setAttribute("aria-pressed", String(state.folded));
        hf.say(
            id("timeline-words"),
            `${hf.plural(view.attempts.length, "attempt")}, ` +
                `${hf.plural(
                    view.events.reduce((sum, each) => sum + (each.count || 1), 0),
                    "event",
                )}, ` +
                `${hf.moment(view.time.start)} to ${hf.moment(view.time.end)}.`,
        );
        legend();
        setAxis(true);
        draw();
        if (hf.changed("events", [view.events.length, view.time.start])) state.table.refresh();
    };
    hf.lookAt = (from, to) => act.zoom(from, to);
})(holdfast);
