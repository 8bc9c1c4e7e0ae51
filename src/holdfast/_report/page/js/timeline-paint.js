/* The timeline's two pictures: the overview with its axis, and the rows of attempts. */
(function (hf) {
    "use strict";

    hf.TOP = { lane: 22, axis: 34, right: 10 };
    // Drawn last and never thinner than can be seen: what one looks for.
    const LOUD = { stuck: true, lost: true };

    function band(context, kind, x0, x1, y, height) {
        const width = Math.max(LOUD[kind] ? 2 : 1, x1 - x0);
        context.fillStyle = hf.fill(context, kind);
        if (kind === "down" || kind === "stopped" || kind === "queue") {
            // No process: a thinner band than the ones in which something ran.
            context.fillRect(x0, y + height * 0.3, width, height * 0.4);
        } else context.fillRect(x0, y, width, height);
    }

    function bands(context, segments, scale, y, height, edge) {
        for (const loud of [false, true]) {
            for (const segment of segments) {
                if (Boolean(LOUD[segment.kind]) !== loud) continue;
                // On whole pixels, or neighbours of one kind would show a seam.
                const x0 = Math.round(scale(segment.start));
                const x1 = Math.round(scale(segment.end));
                if (x1 < edge[0] - 2 || x0 > edge[1] + 2) continue;
                band(
                    context,
                    segment.kind,
                    Math.max(x0, edge[0] - 2),
                    Math.min(x1, edge[1] + 2),
                    y,
                    height,
                );
            }
        }
    }

    hf.paintTop = function (state) {
        const { axis, width, gutter } = state;
        const { lane, axis: axisHeight, right } = hf.TOP;
        const context = hf.ready(state.top, width, lane + 10 + axisHeight);
        const wide = width - gutter - right;
        const whole = (t) => gutter + (axis.to(t) / axis.length) * wide;
        bands(context, state.view.segments, whole, 4, lane - 6, [gutter, gutter + wide]);
        for (const mark of state.marks) {
            if (mark.isQuiet || (mark.group !== "death" && mark.group !== "hang")) continue;
            context.fillStyle = hf.colour("bad");
            context.fillRect(whole(mark.event.t) - 0.75, 0, 1.5, lane + 2);
        }
        context.font = `11px ${hf.sans()}`;
        context.fillStyle = hf.colour("ink-2");
        context.textAlign = "right";
        context.textBaseline = "middle";
        context.fillText("all", gutter - 8, lane / 2 + 1);

        if (state.from > 0 || state.to < axis.length) {
            const x0 = gutter + (state.from / axis.length) * wide;
            const x1 = Math.max(x0 + 3, gutter + (state.to / axis.length) * wide);
            context.fillStyle = hf.colour("paper");
            context.globalAlpha = 0.62;
            context.fillRect(gutter, 0, x0 - gutter, lane + 2);
            context.fillRect(x1, 0, gutter + wide - x1, lane + 2);
            context.globalAlpha = 1;
            context.strokeStyle = hf.colour("accent");
            context.lineWidth = 1.5;
            context.strokeRect(x0, 1, x1 - x0, lane);
        }

        const y = lane + 10;
        const x = (place) => gutter + ((place - state.from) / (state.to - state.from)) * wide;
        context.lineWidth = 1;
        context.textAlign = "left";
        const folds = foldLabels(context, axis, x, [gutter, gutter + wide]);
        for (const tick of state.ticks) {
            const at = Math.round(x(tick.place)) + 0.5;
            context.strokeStyle = hf.colour("line-2");
            context.beginPath();
            context.moveTo(at, y + (tick.day ? 2 : 18));
            context.lineTo(at, y + axisHeight);
            context.stroke();
            if (tick.day) {
                context.fillStyle = hf.colour("ink");
                context.font = `600 11px ${hf.sans()}`;
                if (at + 6 + context.measureText(tick.day).width < width) {
                    context.fillText(tick.day, at + 4, y + 8);
                }
            }
            context.fillStyle = hf.colour("ink-2");
            context.font = `11px ${hf.sans()}`;
            const end = at + 6 + context.measureText(tick.clock).width;
            // How long a fold is, is told nowhere else; the clock is told by the next tick.
            const isFree = folds.every((fold) => end < fold.left || at > fold.right);
            if (end < width && isFree) context.fillText(tick.clock, at + 4, y + 24);
        }
        for (const fold of axis.folds) {
            const middle = (x(fold.p0) + x(fold.p1)) / 2;
            if (middle < gutter || middle > gutter + wide) continue;
            context.strokeStyle = hf.colour("ink-2");
            context.beginPath();
            for (const shift of [-2, 2]) {
                context.moveTo(middle + shift - 2, y + axisHeight - 1);
                context.lineTo(middle + shift + 2, y + axisHeight - 9);
            }
            context.stroke();
        }
        context.fillStyle = hf.colour("ink-2");
        context.font = `10px ${hf.sans()}`;
        context.textAlign = "center";
        for (const fold of folds) context.fillText(fold.text, fold.middle, y + axisHeight - 16);
        context.textAlign = "left";
    };

    /** How long each wide fold is, and from where to where that is written. */
    function foldLabels(context, axis, x, [from, to]) {
        context.font = `10px ${hf.sans()}`;
        const found = [];
        for (const fold of axis.folds) {
            const middle = (x(fold.p0) + x(fold.p1)) / 2;
            if (middle < from || middle > to || x(fold.p1) - x(fold.p0) < 22) continue;
            const text = hf
                .duration(fold.t1 - fold.t0)
                .split(" ")
                .slice(0, 2)
                .join(" ");
            const half = context.measureText(text).width / 2 + 3;
            const last = found[found.length - 1];
            if (last && last.right > middle - half) continue;
            found.push({ text, middle, left: middle - half, right: middle + half });
        }
        return found;
    }

    const SHAPES = {
        cross(c, x, y, r) {
            for (const [a, b] of [
                [-1, 1],
                [1, 1],
            ]) {
                c.moveTo(x - a * r, y - b * r);
                c.lineTo(x + a * r, y + b * r);
            }
            return "stroke";
        },
        diamond(c, x, y, r) {
            c.moveTo(x, y - r - 1);
            c.lineTo(x + r + 1, y);
            c.lineTo(x, y + r + 1);
            c.lineTo(x - r - 1, y);
            c.closePath();
        },
        down(c, x, y, r) {
            c.moveTo(x - r, y - r);
            c.lineTo(x + r, y - r);
            c.lineTo(x, y + r);
            c.closePath();
        },
        up(c, x, y, r) {
            c.moveTo(x - r, y + r);
            c.lineTo(x + r, y + r);
            c.lineTo(x, y - r);
            c.closePath();
        },
        square(c, x, y, r) {
            c.rect(x - r + 0.5, y - r + 0.5, 2 * r - 1, 2 * r - 1);
        },
        flag(c, x, y, r) {
            c.moveTo(x - r + 1, y + r);
            c.lineTo(x - r + 1, y - r);
            c.lineTo(x + r, y - r / 3);
            c.lineTo(x - r + 1, y + r / 3);
            c.closePath();
        },
        ring(c, x, y, r) {
            c.arc(x, y, r - 1, 0, 7);
            return "ring";
        },
        dot(c, x, y, r) {
            c.arc(x, y, r - 1.5, 0, 7);
        },
    };

    /** One mark; also drawn small in the legend. */
    hf.paintMark = function (context, group, x, y, r) {
        const [, shape, , colour] = hf.GROUPS[group];
        context.fillStyle = context.strokeStyle = hf.colour(colour);
        if (shape === "tick" || shape === "hair") {
            const wide = shape === "tick" ? 2 : 1;
            context.fillRect(x - wide / 2, y - 2, wide, shape === "tick" ? 5 : 3);
            return;
        }
        context.beginPath();
        const how = SHAPES[shape](context, x, y, r);
        // A halo of paper lets a mark be seen on any band.
        context.lineJoin = "round";
        context.strokeStyle = hf.colour("raised");
        context.lineWidth = how === "stroke" ? 5 : 3;
        context.stroke();
        context.strokeStyle = hf.colour(colour);
        context.lineWidth = 2;
        if (how === "ring") {
            context.fillStyle = hf.colour("raised");
            context.fill();
            context.stroke();
        } else if (how === "stroke") context.stroke();
        else context.fill();
    };

    function shorten(context, text, room) {
        if (context.measureText(text).width <= room) return text;
        let low = 0;
        let high = text.length;
        while (low < high) {
            const mid = (low + high + 1) >> 1;
            if (context.measureText(text.slice(0, mid) + "…").width <= room) low = mid;
            else high = mid - 1;
        }
        return low > 8 ? text.slice(0, low).trimEnd() + "…" : "";
    }

    function words(context, state, lane, x0, x1, y) {
        const left = x0 - state.gutter - 12;
        const right = state.width - hf.TOP.right - x1 - 14;
        if (Math.max(left, right) < 90) return;
        const text = shorten(
            context,
            hf.capital(lane.attempt.how || lane.attempt.outcome),
            Math.max(left, right),
        );
        context.fillStyle = hf.colour("ink-2");
        context.textAlign = right >= left ? "left" : "right";
        context.fillText(text, right >= left ? x1 + 10 : x0 - 8, y);
    }

    hf.paintRows = function (state) {
        const { width, gutter, axis } = state;
        const context = hf.ready(state.canvas, width, state.height);
        const wide = width - gutter - hf.TOP.right;
        const x = (t) => gutter + ((axis.to(t) - state.from) / (state.to - state.from)) * wide;
        const edge = [gutter, gutter + wide];
        const high = state.rowHeight;
        const bar = Math.min(16, Math.max(3, Math.round(high * 0.56)));
        const radius = Math.min(4.5, Math.max(2.5, bar / 2.6));

        context.strokeStyle = hf.colour("line");
        context.lineWidth = 1;
        context.beginPath();
        for (const tick of state.ticks) {
            const at =
                Math.round(gutter + ((tick.place - state.from) / (state.to - state.from)) * wide) +
                0.5;
            context.moveTo(at, 0);
            context.lineTo(at, state.height);
        }
        context.stroke();

        context.textBaseline = "middle";
        state.shown.forEach((lane, index) => {
            const top = index * high;
            const y = Math.round(top + (high - bar) / 2);
            const middle = y + bar / 2;
            const x0 = Math.max(edge[0], x(lane.from));
            const x1 = Math.min(edge[1], x(lane.to));
            context.font = `11px ${hf.sans()}`;
            if (high >= 11 || index % Math.ceil(11 / high) === 0) {
                context.textAlign = "right";
                context.fillStyle = lane === state.lane ? hf.colour("ink") : hf.colour("ink-2");
                context.fillText(String(lane.attempt.number), gutter - 8, middle);
            }
            context.save();
            context.beginPath();
            context.rect(edge[0] - 1, 0, wide + 2, state.height);
            context.clip();
            bands(context, lane.segments, x, y, bar, edge);
            context.restore();
            if (high >= 11) words(context, state, lane, x0, x1, middle);
        });
        const order = Object.keys(hf.GROUPS).sort((a, b) => hf.GROUPS[a][2] - hf.GROUPS[b][2]);
        for (const group of order) {
            if (state.hidden.has(group)) continue;
            state.shown.forEach((lane, index) => {
                const y = Math.round(index * high + (high - bar) / 2);
                const low = group === "checkpoint" || group === "snapshot";
                const above = group === "other";
                const apart = low ? 4 : above ? 6 : radius * 1.5;
                let last = -9;
                for (const mark of lane.events) {
                    if (mark.group !== group || mark.isQuiet) continue;
                    const at = x(mark.event.t);
                    if (at < edge[0] - 1 || at > edge[1] + 1) continue;
                    // Many in one: a line along their time, as a fence of marks would hide the bar.
                    if (mark.event.count > 1) {
                        context.fillStyle = hf.colour(hf.GROUPS[group][3]);
                        const end = Math.min(mark.event.until || mark.event.t, lane.to);
                        const until = Math.min(edge[1], x(end));
                        context.fillRect(
                            at,
                            low ? y + bar + 1.5 : y + bar + 3,
                            Math.max(1.5, until - at),
                            low ? 1 : 1.5,
                        );
                        if (!low) continue;
                    }
                    if (at - last < apart) continue;
                    last = at;
                    // What is frequent keeps off the bar: saves below it, small things above.
                    const level = low ? y + bar + 1 : above ? y - 1 : y + bar / 2;
                    hf.paintMark(context, group, at, level, above ? Math.min(3, radius) : radius);
                }
            });
        }
        const chosen = state.chosen;
        const row = chosen ? state.shown.indexOf(chosen.lane) : -1;
        if (row >= 0) {
            context.strokeStyle = hf.colour("focus");
            context.lineWidth = 2;
            context.beginPath();
            context.arc(x(chosen.event.t), Math.round(row * high + high / 2), radius + 4.5, 0, 7);
            context.stroke();
        }
    };
})(holdfast);
