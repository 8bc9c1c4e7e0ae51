/* Tags, a note and the archive: shown in the head of a run, changed in a dialog. */
(function (hf) {
    "use strict";
    const { el, id, say } = hf;
    const root = document.documentElement;
    let held = { tags: [], note: "", is_archived: false };

    const canChange = () => Boolean(root.dataset.labels);

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
        const told = await hf.post(root.dataset.labels, wanted);
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
})(holdfast);
