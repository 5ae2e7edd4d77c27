// Plots in the page's colours, and those of its sections.
"use strict";

const plots = (() => {
  const COLOURS = ["#3f7fd9", "#d98218", "#c2487f", "#2f9e76", "#8a63d2", "#7a8a2a", "#c0504d", "#4aa3a2"];

  // Plotly reads some markup in its texts: names are shown as they are.
  const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

  function draw(id, traces, layout) {
    const place = document.getElementById(id);
    const style = getComputedStyle(document.body);
    const grid = getComputedStyle(place).getPropertyValue("outline-color");
    const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid, automargin: true };
    const full = {
      margin: { l: 56, r: 12, t: 12, b: 44 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: style.color, family: style.fontFamily, size: 12 },
      showlegend: false,
      hovermode: "closest",
      ...layout,
      xaxis: { ...axis, ...layout.xaxis },
      yaxis: { ...axis, ...layout.yaxis },
    };
    Plotly.react(place, traces, full, { responsive: true, displaylogo: false, displayModeBar: false });
  }

  // Room for a legend above the plot.
  const ROOM = {
    showlegend: true,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
    margin: { l: 56, r: 12, t: 60, b: 44 },
  };

  // The plots of sections, which do not change.
  function drawFigures() {
    const { figures } = JSON.parse(document.getElementById("data").textContent);
    figures.forEach((figure, index) => {
      if (figure !== null) draw(`figure-${index}`, figure.data, { ...ROOM, ...figure.layout });
    });
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawFigures);
  drawFigures();
  return { COLOURS, plain, draw, ROOM };
})();
