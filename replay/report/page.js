"use strict";
/* Unpacks the charting library that this file carries, then draws the figures that it carries. Nothing is fetched. */
(async () => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const say = (text) => document.querySelectorAll(".chart").forEach((place) => { place.textContent = text; });
  try {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent.trim()), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.appendChild(script);
  } catch (error) {
    say("This browser cannot unpack the charts (it lacks DecompressionStream); the tables above are complete.");
    return;
  }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const look = ({ layout, height, data }) => {
    const legend = data.some((trace) => trace.showlegend !== false), below = legend ? 92 : 32;
    const style = getComputedStyle(document.documentElement);
    const ink = style.getPropertyValue("--ink").trim(), line = style.getPropertyValue("--line").trim();
    const dressed = structuredClone(layout);
    Object.assign(dressed, {
      height, showlegend: legend, margin: { l: 58, r: 16, t: 30, b: below }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest", bargap: 0.25,
      font: { color: ink, family: "system-ui, sans-serif", size: 12 },
      legend: { orientation: "h", yanchor: "top", y: -54 / (height - 30 - below), x: 0, font: { size: 12 }, itemsizing: "constant" },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: style.getPropertyValue("--soft").trim(), activecolor: ink },
    });
    for (const [name, axis] of Object.entries(dressed)) {
      if (/^[xy]axis/.test(name)) Object.assign(axis, { gridcolor: line, linecolor: line, automargin: true });
    }
    return dressed;
  };
  const options = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
  const draw = () => {
    for (const figure of figures) {
      const place = document.getElementById(figure.key);
      place.textContent = "";
      Plotly.react(place, figure.data, look(figure), options);
    }
    document.documentElement.dataset.drawn = String(figures.length);
  };
  draw();
  dark.addEventListener("change", draw);
})();
