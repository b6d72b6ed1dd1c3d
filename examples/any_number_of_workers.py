"""A product and a training step, written once for any number of workers:

    python examples/any_number_of_workers.py 1
    python examples/any_number_of_workers.py 20

No line depends on the number, and no line moves data: GT lays tensors out, plans each product and exchanges the parts.
"""

import sys

import torch

import gt


def main(workers: int) -> None:
    torch.manual_seed(0)
    gt.init(workers=workers, mode="virtual")
    with gt.open_mesh(workers, ("workers",)):
        a, b = torch.randn(96, 160), torch.randn(160, 64)

        # 1. Plain tensors: GT chooses the grid of workers on which the product moves the fewest bytes.
        print(gt.distributed.explain(a, b).bytes, "bytes between workers, by plan")
        product = gt.distributed.matmul(a, b)
        print("laid out as", product.spec, "on", product.spec.mesh)
        torch.testing.assert_close(product.cpu(), a @ b, rtol=1e-4, atol=1e-4)

        # 2. A layout of the result, and an algorithm: other bytes and memory, the same value.
        x, w = gt.shard(a, dim=0), gt.shard(b, dim=0)
        for algo in (None, "inner", "summa"):
            found = gt.distributed.matmul(x, w, out=[gt.Shard(0)], algo=algo, panel=80)
            torch.testing.assert_close(found.cpu(), a @ b, rtol=1e-4, atol=1e-4)

        # 3. Ordinary PyTorch on these tensors: rows of the batch are cut, the weight is whole on every worker.
        weight = gt.replicate(0.05 * b).requires_grad_()
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(x @ weight, x @ w)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print("losses", *[f"{loss:.2f}" for loss in losses])
    gt.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4)
