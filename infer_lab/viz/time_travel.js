function (mark, data) {
  const make = (tag, parent, text, style) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (style) element.style.cssText = style;
    if (parent) parent.appendChild(element);
    return element;
  };
  const chip = (parent, name, text) => {
    const [back, ink] = data.fill[name] || ["white", "black"];
    make("span", parent, text || name, `background:${back};color:${ink};border:1px solid gray;` +
      "border-radius:3px;padding:0 6px;margin-right:4px");
  };
  const names = (parent, label, list) => {
    const line = make("div", parent, undefined, "min-height:1.7em");
    make("span", line, label + " ", "display:inline-block;width:7em");
    list.forEach(name => chip(line, name));
    if (!list.length) make("span", line, "–");
  };
  const draw = (box, frame) => {
    box.replaceChildren();
    names(box, "queue", frame.waiting);
    names(box, "preempted", frame.preempted);
    const table = make("table", box, undefined, "border-collapse:collapse;margin:6px 0");
    const head = make("tr", table);
    ["request", "computes positions", "tokens in", "token out", ""].forEach(
      text => make("th", head, text, "text-align:left;padding:1px 14px 1px 0;font-weight:600"));
    frame.rows.forEach(([name, start, end, token, state]) => {
      const row = make("tr", table);
      chip(make("td", row, undefined, "padding:1px 14px 1px 0"), name);
      [start + 1 === end ? `${start}` : `${start} to ${end - 1}`, end - start, token, state].forEach(
        text => make("td", row, text, "text-align:left;padding:1px 14px 1px 0;white-space:pre"));
    });
    const map = make("div", box, undefined,
      `display:grid;grid-template-columns:repeat(${data.columns},2.6em);gap:2px`);
    frame.blocks.forEach((owner, block) => {
      const first = owner.split("+")[0], shared = owner.includes("+");
      const [back, ink] = owner === data.cached ? [data.grey, "black"]
        : shared ? ["white", "black"] : data.fill[first] || ["white", "black"];
      const cell = make("div", map, owner === data.cached ? "·" : shared && owner.length > 5 ? "×" + owner.split("+").length : owner,
        `background:${back};color:${ink};border:${shared ? "2px dashed black" : "1px solid gray"};` +
        "height:1.7em;line-height:1.6em;text-align:center;overflow:hidden;font-size:85%");
      cell.title = `block ${block}: ${owner || "free"}`;
    });
  };
  document.querySelectorAll("." + mark).forEach(root => {
    if (root.dataset.live) return;
    root.dataset.live = "yes";
    root.querySelector(".still").style.display = "none";
    const box = make("div", root, undefined, "background:white;color:black;padding:8px;" +
      "max-width:760px;font-size:14px;border:1px solid #d9d9d9");
    make("div", box, data.title, "font-weight:600;margin-bottom:4px");
    const bar = make("div", box, undefined, "display:flex;align-items:center;gap:8px");
    const back = make("button", bar, "◀"), slider = make("input", bar), next = make("button", bar, "▶");
    const label = make("span", bar);
    const scene = make("div", box, undefined, "margin-top:6px");
    Object.assign(slider, {type: "range", min: 0, max: data.frames.length - 1, value: data.first});
    slider.style.width = "360px";
    slider.setAttribute("aria-label", "step");
    back.setAttribute("aria-label", "previous step");
    next.setAttribute("aria-label", "next step");
    const show = () => {
      const i = Number(slider.value);
      label.textContent = `step ${data.frames[i].step}, ${i + 1} of ${data.frames.length}`;
      draw(scene, data.frames[i]);
    };
    const move = by => { slider.value = Number(slider.value) + by; show(); };
    back.onclick = () => move(-1);
    next.onclick = () => move(1);
    slider.oninput = show;
    show();
  });
}
