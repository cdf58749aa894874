"""Where blocks lie in tensors of the layouts that engines have."""

import unittest

from kvasir_kv.library import Plane
from kvasir_kv.planes import LayoutError, layout
from memory import Tensor

BLOCKS, HEADS, TOKENS, CONTENT = 8, 2, 16, 64
PAGE = HEADS * TOKENS * CONTENT


def planes(tensor: Tensor, blocks: int = BLOCKS) -> list[tuple[int, int, int]]:
    found = layout({"layer": tensor}, blocks).planes
    return [(plane.start - tensor.data_ptr(), plane.block_stride, plane.block_bytes) for plane in found]


class Cuts(unittest.TestCase):
    def test_heads_are_found_whatever_the_order(self) -> None:
        shape = (BLOCKS, HEADS, TOKENS, CONTENT)
        for what, tensor, rows, head_bytes in [
            ("heads before tokens", Tensor(shape), 1, TOKENS * CONTENT),
            ("tokens before heads", Tensor(shape, (0, 2, 1, 3)), TOKENS, CONTENT),
            ("heads outermost", Tensor(shape, (1, 0, 2, 3)), 1, TOKENS * CONTENT),
            ("kernels with half blocks", Tensor((2 * BLOCKS, HEADS, TOKENS // 2, CONTENT)), 2, TOKENS // 2 * CONTENT),
        ]:
            with self.subTest(what):
                (cut,) = layout({"layer": tensor}, BLOCKS).head_layouts.values()
                self.assertEqual((cut.rows, cut.heads, cut.head_bytes), (rows, HEADS, head_bytes))
        # A process with one head of several has it where the others have theirs.
        one = (BLOCKS, 1, TOKENS, CONTENT)
        for order, rows in [((), 1), ((0, 2, 1, 3), TOKENS)]:
            (cut,) = layout({"layer": Tensor(one, order)}, BLOCKS).head_layouts.values()
            self.assertEqual((cut.rows, cut.heads, cut.head_bytes), (rows, 1, TOKENS * CONTENT // rows))
        (cut,) = layout({"layer": Tensor((BLOCKS, TOKENS, 576))}, BLOCKS).head_layouts.values()
        self.assertEqual((cut.rows, cut.heads, cut.head_bytes), (1, 1, TOKENS * 576))


class Layouts(unittest.TestCase):
    def test_planes_of_known_layouts(self) -> None:
        shape = (BLOCKS, HEADS, TOKENS, CONTENT)
        for what, tensor, wanted in [
            ("heads before tokens", Tensor(shape), [(0, PAGE, PAGE)]),
            ("tokens before heads", Tensor(shape, (0, 2, 1, 3)), [(0, PAGE, PAGE)]),
            ("keys and values in a block", Tensor((BLOCKS, 2, TOKENS, CONTENT)), [(0, PAGE, PAGE)]),
            ("latents", Tensor((BLOCKS, TOKENS, 576)), [(0, TOKENS * 576, TOKENS * 576)]),
            (
                "keys and values apart",
                Tensor((2, BLOCKS, HEADS, TOKENS, CONTENT)),
                [(0, PAGE, PAGE), (BLOCKS * PAGE, PAGE, PAGE)],
            ),
            (
                "heads outermost",
                Tensor(shape, (1, 0, 2, 3)),
                [(0, PAGE // 2, PAGE // 2), (BLOCKS * PAGE // 2, PAGE // 2, PAGE // 2)],
            ),
            ("kernels with half blocks", Tensor((2 * BLOCKS, HEADS, TOKENS // 2, CONTENT)), [(0, PAGE, PAGE)]),
        ]:
            with self.subTest(what):
                self.assertEqual(planes(tensor), wanted)

    def test_layers_side_by_side_in_a_block_are_one_plane(self) -> None:
        whole = Tensor((BLOCKS, 4, PAGE))
        layers = {}
        for layer in range(4):
            tensor = Tensor((BLOCKS, PAGE), start=whole.data_ptr() + layer * PAGE)
            tensor.strides = (4 * PAGE, 1)
            layers[f"layer.{layer}"] = tensor
        self.assertEqual(layout(layers, BLOCKS).planes, (Plane(whole.data_ptr(), 4 * PAGE, 4 * PAGE),))

    def test_a_layer_that_shares_another_one_s_cache_is_copied_once(self) -> None:
        tensor = Tensor((BLOCKS, PAGE))
        found = layout({"layer.0": tensor, "layer.1": tensor}, BLOCKS)
        self.assertEqual((len(found.planes), found.block_bytes), (1, PAGE))

    def test_groups_that_take_turns_in_a_block_are_copied_once_and_whole(self) -> None:
        # As vLLM lays out groups whose layers differ: the smaller one's page is padded to the larger one's, from the same address.
        whole = Tensor((BLOCKS, PAGE))
        small, large = Tensor((BLOCKS, PAGE // 2), start=whole.data_ptr()), Tensor((BLOCKS, PAGE), start=whole.data_ptr())
        small.strides = (PAGE, 1)
        behind = Tensor((BLOCKS, PAGE // 2), start=whole.data_ptr() + PAGE // 4)
        behind.strides = (PAGE, 1)
        for layers in {"a": small, "b": large}, {"a": large, "b": small}, {"a": small, "b": behind, "c": large}:
            found = layout(layers, BLOCKS)
            self.assertEqual(found.planes, (Plane(whole.data_ptr(), PAGE, PAGE),))
            self.assertEqual(found.block_bytes, PAGE)
        found = layout({"a": small, "b": behind}, BLOCKS)
        self.assertEqual(found.planes, (Plane(whole.data_ptr(), PAGE, 3 * PAGE // 4),))
        other = Tensor((BLOCKS, PAGE // 2), start=whole.data_ptr())
        with self.assertRaisesRegex(LayoutError, "overlap"):
            layout({"a": large, "b": other}, BLOCKS)

    def test_blocks_that_are_not_whole_are_refused(self) -> None:
        padded = Tensor((BLOCKS, HEADS, TOKENS, CONTENT))
        padded.shape = (BLOCKS, HEADS, TOKENS, CONTENT // 2)
        for what, tensor, blocks, text in [
            ("padding inside", padded, BLOCKS, "a block is not whole"),
            ("blocks innermost", Tensor((BLOCKS, PAGE), (1, 0)), BLOCKS, "in pieces of 1 bytes"),
            ("no axis of blocks", Tensor((PAGE, 3)), 5, "none of the first two axes"),
            ("two axes of blocks", Tensor((2, 2, PAGE)), 2, "either of the first two axes"),
        ]:
            with self.subTest(what), self.assertRaisesRegex(LayoutError, text):
                layout({"layer": tensor}, blocks)
        with self.assertRaisesRegex(LayoutError, "no tensors"):
            layout({}, BLOCKS)

    def test_facts_tell_orders_apart_and_not_addresses_or_sizes_of_the_pool(self) -> None:
        shape = (BLOCKS, HEADS, TOKENS, CONTENT)

        def facts(tensor: Tensor, blocks: int = BLOCKS) -> tuple[object, ...]:
            return layout({"layer": tensor}, blocks).facts

        self.assertEqual(facts(Tensor(shape)), facts(Tensor(shape)))
        self.assertEqual(facts(Tensor(shape)), facts(Tensor((5 * BLOCKS, *shape[1:])), 5 * BLOCKS))
        self.assertNotEqual(facts(Tensor(shape)), facts(Tensor(shape, (0, 2, 1, 3))))
        self.assertNotEqual(facts(Tensor(shape)), facts(Tensor((BLOCKS, HEADS, TOKENS * 2, CONTENT // 2))))

    def test_facts_tell_orders_of_planes_apart(self) -> None:
        shape = (2, BLOCKS, HEADS, TOKENS, CONTENT)
        found = [layout({"layer": Tensor(shape, order)}, BLOCKS) for order in ((0, 2, 1, 3, 4), (2, 0, 1, 3, 4))]
        self.assertEqual([len(one.planes) for one in found], [2 * HEADS, 2 * HEADS])
        self.assertNotEqual(found[0].facts, found[1].facts)


if __name__ == "__main__":
    unittest.main()
