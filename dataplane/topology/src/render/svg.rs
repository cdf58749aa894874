//! Drawing of the picture: nested boxes, the path in one colour, bandwidths on the chosen rails.
//!
//! Plain SVG 1.1 with one style sheet that follows the viewer's light or dark theme. Sizes are computed from
//! the tree: devices have one size, a box is as large as its content, rows wrap at a width.

use std::fmt::Write as _;

use crate::render::outline::{Kind, Node};

const LEAF_WIDTH: u32 = 128;
const LEAF_HEIGHT: u32 = 62;
const GAP: u32 = 10;
const HEADER: u32 = 24;
const ROW_WIDTH_MAX: u32 = 1400;
const NOTE_HEIGHT: u32 = 18;
const NOTES_MAX: usize = 16;

const STYLE: &str = "\
text{font:12px system-ui,sans-serif;fill:#1f2937}\
.t{font-size:17px;font-weight:600}.n{font-weight:600}.d{font-size:10.5px;fill:#5b6675}\
.p{fill:#ffffff}.b{fill:none;stroke:#c3cad5;stroke-width:1}\
.numa{fill:#f3f5f8}.bridge{fill:#e9edf2}.switch{fill:#dfe5ec}\
.gpu{fill:#dff2e3;stroke:#8fbf9b}.nic{fill:#e1ecfb;stroke:#93b2dd}.disk{fill:#f4ecdc;stroke:#cdb98c}.other{fill:#eeeeee;stroke:#bbbbbb}\
.on{stroke:#d9480f;stroke-width:2}.end{stroke:#d9480f;stroke-width:3}.g{font-weight:700;fill:#c2410c}\
@media(prefers-color-scheme:dark){text{fill:#e5e9f0}.d{fill:#a3adbb}.p{fill:#14181f}.b{stroke:#414b59}\
.numa{fill:#1b212a}.bridge{fill:#222a35}.switch{fill:#2a3441}\
.gpu{fill:#1d3a27;stroke:#4a8a5c}.nic{fill:#1c3150;stroke:#4f7cb8}.disk{fill:#3a3220;stroke:#8a7740}.other{fill:#333333;stroke:#666666}\
.on,.end{stroke:#ff8a3d}.g{fill:#ff9d5c}}";

/// One laid-out box.
struct Placed<'a> {
    node: &'a Node,
    x: u32,
    y: u32,
    width: u32,
    height: u32,
}

/// Draws a tree with a title above and notes below.
pub(crate) fn draw(system: &Node, title: &str, notes: &[String]) -> String {
    let mut boxes = Vec::new();
    let top = 44;
    let mut width = 480;
    let mut y = top;
    for numa in &system.children {
        let (box_width, height) = place(numa, GAP, y, &mut boxes);
        width = width.max(box_width + 2 * GAP);
        y += height + GAP;
    }
    let notes: Vec<&String> = notes.iter().take(NOTES_MAX).collect();
    let longest = notes.iter().map(|note| note.chars().count()).chain([title.chars().count() * 3 / 2]).max();
    let characters = u32::try_from(longest.unwrap_or(0).min(200)).unwrap_or(0);
    width = width.max(characters * 13 / 2 + 2 * GAP);
    // Gives the boxes of NUMA nodes the same width.
    for placed in boxes.iter_mut().filter(|placed| placed.node.kind == Kind::Numa) {
        placed.width = width - 2 * GAP;
    }
    let height = y + NOTE_HEIGHT * u32::try_from(notes.len()).unwrap_or(0) + GAP;
    let mut svg = String::new();
    // Writing to a string cannot fail.
    let _ = write(&mut svg, (width, height), title, &boxes, &notes, y);
    svg
}

fn write(
    svg: &mut String,
    (width, height): (u32, u32),
    title: &str,
    boxes: &[Placed<'_>],
    notes: &[&String],
    notes_y: u32,
) -> std::fmt::Result {
    writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" role=\"img\">"
    )?;
    writeln!(svg, "<title>{}</title>\n<style>{STYLE}</style>", escape(title))?;
    writeln!(svg, "<rect class=\"p\" width=\"{width}\" height=\"{height}\"/>")?;
    writeln!(svg, "<text class=\"t\" x=\"{GAP}\" y=\"28\">{}</text>", escape(title))?;
    for placed in boxes {
        write_box(svg, placed)?;
    }
    for (index, note) in (0_u32..).zip(notes) {
        let y = notes_y + NOTE_HEIGHT * index + 12;
        writeln!(svg, "<text x=\"{GAP}\" y=\"{y}\">{}</text>", escape(note))?;
    }
    writeln!(svg, "</svg>")
}

fn write_box(svg: &mut String, placed: &Placed<'_>) -> std::fmt::Result {
    let Placed { node, x, y, width, height } = placed;
    let class = match node.kind {
        Kind::System | Kind::Numa => "numa",
        Kind::HostBridge => "bridge",
        Kind::Switch => "switch",
        Kind::Gpu => "gpu",
        Kind::Nic => "nic",
        Kind::Disk => "disk",
        Kind::Other => "other",
    };
    let path = match (node.marked, node.on_path) {
        (true, _) => " end",
        (false, true) => " on",
        (false, false) => "",
    };
    writeln!(
        svg,
        "<rect class=\"b {class}{path}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" rx=\"6\"/>"
    )?;
    let (text_x, text_y) = (x + 8, y + 16);
    if is_leaf(node) {
        // The address on one line, the link on the next.
        let (address, link) = node.detail.split_once(' ').unwrap_or((&node.detail, ""));
        writeln!(
            svg,
            "<text class=\"n\" x=\"{text_x}\" y=\"{text_y}\">{}</text>",
            escape(&cut(&node.title, 18))
        )?;
        writeln!(svg, "<text class=\"d\" x=\"{text_x}\" y=\"{}\">{}</text>", y + 31, escape(address))?;
        let (class, line) =
            node.badge.as_ref().map_or(("d", link.to_owned()), |badge| ("g", format!("◀ {badge}")));
        return writeln!(
            svg,
            "<text class=\"{class}\" x=\"{text_x}\" y=\"{}\">{}</text>",
            y + 48,
            escape(&cut(&line, 20))
        );
    }
    writeln!(
        svg,
        "<text x=\"{text_x}\" y=\"{text_y}\"><tspan class=\"n\">{}</tspan> <tspan class=\"d\">{}</tspan></text>",
        escape(&node.title),
        escape(&node.detail)
    )
}

fn is_leaf(node: &Node) -> bool {
    matches!(node.kind, Kind::Gpu | Kind::Nic | Kind::Disk | Kind::Other)
}

/// Places a box and its content, and returns its width and height. Parents come before children, so that they
/// are painted below them.
fn place<'a>(node: &'a Node, x: u32, y: u32, boxes: &mut Vec<Placed<'a>>) -> (u32, u32) {
    let index = boxes.len();
    boxes.push(Placed { node, x, y, width: LEAF_WIDTH, height: LEAF_HEIGHT });
    if is_leaf(node) {
        return (LEAF_WIDTH, LEAF_HEIGHT);
    }
    let header = node.title.chars().count() * 7 + node.detail.chars().count() * 6 + 24;
    let header = u32::try_from(header.min(900)).unwrap_or(900);
    let (width, height) = if node.children.len() <= 2 && node.children.iter().all(is_leaf) {
        place_stack(node, (x, y), header, boxes)
    } else {
        place_rows(node, (x, y), header, boxes)
    };
    boxes[index].width = width;
    boxes[index].height = height;
    (width, height)
}

/// Places a GPU over its NIC, both as wide as the header of the switch around them.
fn place_stack<'a>(
    node: &'a Node,
    (x, y): (u32, u32),
    header: u32,
    boxes: &mut Vec<Placed<'a>>,
) -> (u32, u32) {
    let width = header.max(LEAF_WIDTH + 2 * GAP);
    let mut child_y = y + HEADER;
    for child in &node.children {
        boxes.push(Placed {
            node: child,
            x: x + GAP,
            y: child_y,
            width: width - 2 * GAP,
            height: LEAF_HEIGHT,
        });
        child_y += LEAF_HEIGHT + GAP;
    }
    (width, child_y - y)
}

fn place_rows<'a>(
    node: &'a Node,
    (x, y): (u32, u32),
    header: u32,
    boxes: &mut Vec<Placed<'a>>,
) -> (u32, u32) {
    let mut width = header;
    let (mut child_x, mut child_y, mut row_height) = (x + GAP, y + HEADER, 0);
    for child in &node.children {
        let start = boxes.len();
        let (mut child_width, mut child_height) = place(child, child_x, child_y, boxes);
        if child_x > x + GAP && child_x + child_width > ROW_WIDTH_MAX {
            boxes.truncate(start);
            (child_x, child_y, row_height) = (x + GAP, child_y + row_height + GAP, 0);
            (child_width, child_height) = place(child, child_x, child_y, boxes);
        }
        child_x += child_width + GAP;
        row_height = row_height.max(child_height);
        width = width.max(child_x - x);
    }
    (width, child_y + row_height + GAP - y)
}

fn cut(text: &str, characters_max: usize) -> String {
    if text.chars().count() <= characters_max {
        return text.to_owned();
    }
    text.chars().take(characters_max - 1).chain(['…']).collect()
}

fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '&' => escaped.push_str("&amp;"),
            '"' => escaped.push_str("&quot;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_out_of_the_picture() {
        assert_eq!(escape("<a href=\"x\">&"), "&lt;a href=&quot;x&quot;&gt;&amp;");
        assert_eq!(cut("äöüäöü", 4), "äöü…");
    }
}
