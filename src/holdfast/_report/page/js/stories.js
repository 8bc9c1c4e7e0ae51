/* Post-mortems, proofs, and the ledger of attempts. */
(function (hf) {
    "use strict";
    const { el, id } = hf;

    function listed(title, lines) {
        if (!lines || !lines.length) return null;
        return el("div.story-list", el("h4", title), el("ul", lines.map((line) => el("li", line))));
    }

    function details(death) {
        return [
            el(
                "div.story-columns",
                listed("Evidence", death.evidence),
                listed("What to do", death.advice),
            ),
            death.stacks ? hf.folded("Stacks", () => el("pre", death.stacks)) : null,
        ];
    }

    /** One post-mortem; an older one is closed to its sentence. */
    function story(death, kind, isOpen) {
        const where = hf.joined([
            hf.moment(death.t),
            hf.isNumber(death.attempt) && `attempt ${death.attempt}`,
            hf.isNumber(death.rank) && `rank ${death.rank}`,
            hf.isNumber(death.seconds) && `stood still for ${hf.duration(death.seconds)}`,
        ]);
        const head = [
            el(
                "p.story-where",
                el("span.chip", { data: { tone: "bad" } }, death.cause || kind),
                where,
            ),
            el("h3", hf.capital(death.sentence)),
        ];
        if (isOpen) return el("article", { className: `story is-${kind}` }, head, details(death));
        const closed = el("details", { className: `story is-${kind}` }, el("summary", head));
        closed.addEventListener("toggle", () => {
            if (closed.children.length === 1) closed.append(...details(death).filter(Boolean));
        });
        return closed;
    }

    /** Hangs without a death; one that ended its attempt is shown with that death only. */
    function apart(view) {
        return view.hangs.filter((hang) => {
            const death = view.deaths.find(
                (each) =>
                    each.attempt === hang.attempt &&
                    each.cause.startsWith("hang") &&
                    each.t >= hang.t - 1,
            );
            return !death;
        });
    }

    function withHang(death, view) {
        const hang =
            death.cause.startsWith("hang") &&
            view.hangs.find((each) => each.attempt === death.attempt && death.t >= each.t - 1);
        if (!hang) return death;
        const told = new Set([death.sentence, ...death.evidence]);
        const more = [hang.sentence, ...hang.evidence].filter((line) => line && !told.has(line));
        return {
            ...death,
            evidence: [...death.evidence, ...more],
            seconds: hang.seconds,
            stacks: death.stacks || hang.stacks,
        };
    }

    const OPEN = 3;
    const MOST = 500;
    function postmortems(view) {
        const all = [
            ...view.deaths.map((each) => ["death", withHang(each, view)]),
            ...apart(view).map((each) => ["hang", each]),
        ].sort((a, b) => b[1].t - a[1].t);
        id("postmortems").hidden = !all.length;
        if (!hf.changed("postmortems", all)) return;
        const said = [
            view.deaths.length && `Why ${hf.plural(view.deaths.length, "attempt")} ended`,
            view.hangs.length && hf.plural(view.hangs.length, "hang"),
            all.length > MOST ? `the newest ${MOST}` : "newest first",
        ];
        hf.say(id("postmortems-words"), hf.joined(said, ", ") + ".");
        const body = id("postmortems-body");
        const keys = new Set();
        // One that is there stays as it is: its stacks may be open.
        let before = body.firstChild;
        all.slice(0, MOST).forEach(([kind, each], index) => {
            const key = JSON.stringify([
                kind,
                each.t,
                each.attempt,
                each.sentence,
                each.evidence,
                each.advice,
            ]);
            keys.add(key);
            while (before && !before.dataset.key) before = before.nextSibling;
            if (before && before.dataset.key === key) {
                before = before.nextSibling;
                return;
            }
            const node = story(each, kind, index < OPEN);
            node.dataset.key = key;
            body.insertBefore(node, before);
        });
        for (const node of [...body.children]) if (!keys.has(node.dataset.key)) node.remove();
    }

    function proofs(view) {
        id("proofs").hidden = !view.proofs.length;
        if (!view.proofs.length || !hf.changed("proofs", view.proofs)) return;
        id("proofs-body").replaceChildren(
            ...view.proofs.map((proof) => {
                // What could not be tried, or not be repeated, has proved nothing either way.
                const tone = { equal: "good", differs: "bad" }[proof.verdict] || "warn";
                return el(
                    "article.story.is-proof",
                    el(
                        "p.story-where",
                        el("span.chip", { data: { tone } }, proof.verdict),
                        hf.isNumber(proof.t) ? hf.moment(proof.t) : "",
                    ),
                    el("h3", proof.sentence),
                    proof.interruptions.length > 0 &&
                        el(
                            "div.scroll",
                            hf.table(
                                "Interruptions",
                                [
                                    ["At step", "num", (each) => hf.whole(each.step)],
                                    ["Interruption", "", (each) => each.kind],
                                    ["Result", "", (each) => each.result],
                                ],
                                proof.interruptions,
                            ),
                        ),
                );
            }),
        );
    }

    function attempts(view) {
        id("attempts").hidden = !view.attempts.length;
        if (!view.attempts.length) return;
        hf.say(
            id("attempts-words"),
            `${hf.plural(view.attempts.length, "attempt")}, newest first.`,
        );
        const last = view.attempts[view.attempts.length - 1];
        // While one trains, its row is made again twice a minute: a table that changes with each
        // poll cannot be selected from.
        const age = hf.isNumber(last.end) ? last.end : Math.floor(view.time.end / 30);
        const stamp = [view.attempts.length, last.number, last.outcome, last.how, age];
        if (!hf.changed("attempts", stamp)) return;
        id("attempts-body").replaceChildren(
            hf.table(
                "Attempts, newest first",
                [
                    ["#", "num", (each) => hf.whole(each.number)],
                    [
                        "Outcome",
                        "",
                        (each) =>
                            el(
                                "span.chip",
                                { data: { tone: hf.tone(each.outcome) } },
                                each.outcome,
                            ),
                    ],
                    ["How", "how", (each) => hf.capital(each.how)],
                    [
                        "Steps",
                        "num",
                        (each) => `${hf.whole(each.first_step)} – ${hf.whole(each.last_step)}`,
                    ],
                    [
                        "From",
                        "nowrap",
                        (each) =>
                            each.origin
                                ? `${each.origin.source}, step ${hf.whole(each.origin.step)}`
                                : "the beginning",
                    ],
                    ["Started", "nowrap", (each) => hf.moment(each.start)],
                    [
                        "Lasted",
                        "num",
                        (each) => hf.duration((each.end || view.time.end) - each.start),
                    ],
                    ["Host", "nowrap", (each) => each.host || "–"],
                    [
                        "Status",
                        "num",
                        (each) => (hf.isNumber(each.status) ? String(each.status) : "–"),
                    ],
                ],
                [...view.attempts].reverse(),
            ),
        );
    }

    hf.stories = function (view) {
        postmortems(view);
        proofs(view);
        attempts(view);
    };
})(holdfast);
