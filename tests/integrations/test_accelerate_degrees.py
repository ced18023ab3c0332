"""Scripts with Accelerate that give no degrees are told why ranks are stages."""

from accelerate_checks import adamw, batches, fresh_accelerator, loss_inside, on_ranks, toy


def reported(smp):
    accelerator = fresh_accelerator(smp)
    told = []
    accelerator.smp._report = told.append
    model = toy()
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.backward(loss_inside(model, batches(1)[0]))
    optimizer.step()
    return [text for text in told if text.startswith("Why ")]


def test_without_degrees_the_report_says_why_ranks_are_stages():
    for reports in on_ranks(reported, 2, {}):
        assert len(reports) == 1
        assert reports[0].startswith("Why 2 stages: they work on one batch, as one process does.")
    assert on_ranks(reported, 2, {"pipeline_parallel_degree": 2}) == [[], []]
