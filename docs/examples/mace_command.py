"""Runs the command ``mace_run_train`` unchanged, in fragments."""

from contextlib import nullcontext

from parsl_freetrain import BadInput, Reproducible
from parsl_freetrain.integrations.scripts import run_file


def run_script(ctx, *arguments):
    """Run ``mace_run_train`` with these arguments. Its loop becomes ``ctx.loop``; what it does
    before and after, and its files, are its own.
    """
    import mace.cli.run_train as command

    trained = []

    def place(args):
        for name in ('distributed', 'lbfgs', 'wandb', 'restart_latest', 'plot_frequency'):
            require(not getattr(args, name), f'leave out {name}')
        require(args.device == ctx.device.type, f'say device: {ctx.device.type}')
        return ctx.rank, ctx.local_rank, 1  # the first rank alone logs and writes

    def train(**given):
        trained.extend((one, one.requires_grad) for one in given['model'].parameters())
        fit(ctx, **given)

    require(isinstance(ctx.spec.mode, Reproducible), 'leave the mode of the app as it is')
    theirs = command.init_distributed, command.tools.train
    command.init_distributed, command.tools.train = place, train
    try:
        run_file('mace_run_train', arguments, {})
    finally:
        command.init_distributed, command.tools.train = theirs
    for parameter, requires_grad in trained:  # it has frozen them to evaluate
        parameter.requires_grad_(requires_grad)


def require(holds, otherwise):
    if not holds:
        raise BadInput(f'mace_run_train does not run in fragments like this: {otherwise}.')


def fit(
    ctx, *, model, loss_fn, train_loader, optimizer, lr_scheduler, swa, ema, output_args,
    max_grad_norm, max_num_epochs, **given
):  # fmt: skip
    """In place of ``mace.tools.train``, whose words these are: ``swa`` is the second stage."""
    total = ctx.spec.total_epochs
    require(total == max_num_epochs, f'max_num_epochs is {max_num_epochs}, the app has {total}')
    own = [lr_scheduler.lr_scheduler, *([swa.scheduler] if swa else [])]
    prepared, stepped, *_ = ctx.prepare(model, optimizer, *own, clip_grad_norm=max_grad_norm)
    if ema is not None:
        ctx.keep(ema)
        ctx.after_step(ema.update)
    start = ctx.state or {'lowest': None, 'loss': None, 'worse': 0, 'skipped': 0, 'second': False}
    ctx.state = start

    def in_second(epoch):
        return swa is not None and epoch >= swa.start

    def loss_now():
        return swa.loss_fn if in_second(ctx.epoch + ctx.state['skipped']) else loss_fn

    def end_epoch():
        state, epoch = ctx.state, ctx.epoch + ctx.state['skipped']
        first = in_second(epoch) and not state['second']
        if first:
            state.update(second=True, lowest=None)
        if epoch % given['eval_interval'] == 0:
            with ema.average_parameters() if ema is not None else nullcontext():
                validate(ctx, epoch, model, loss_now(), output_args, given)
                better = state['lowest'] is None or state['loss'] < state['lowest']
                if better or given['save_all_checkpoints']:
                    save(ctx, epoch, model, optimizer, lr_scheduler, first, given)
            state['worse'] = 0 if better else state['worse'] + 1
            state['lowest'] = state['loss'] if better else state['lowest']
            if not better and state['worse'] >= given['patience']:
                if swa is None or in_second(epoch):
                    ctx.finish_early('no better validation for so long as patience says')
                else:
                    state['skipped'] += swa.start - epoch
                    epoch = swa.start
        if epoch + 1 < max_num_epochs and in_second(epoch + 1):
            swa.scheduler.step()
        elif epoch + 1 < max_num_epochs:
            lr_scheduler.step(metrics=state['loss'])
        elif state['skipped']:
            ctx.finish_early('the second stage began early, and is over')

    ctx.each_epoch(end_epoch)
    computed = {
        'compute_force': output_args['forces'],
        'compute_virials': output_args['virials'],
        'compute_stress': output_args['stress'],
    }
    for batch in ctx.loop(train_loader):
        stepped.zero_grad(set_to_none=True)
        here = batch.to(ctx.device)
        loss = loss_now()(pred=prepared(here.to_dict(), training=True, **computed), ref=here)
        loss.backward()
        stepped.step()
        ctx.report(loss=loss.item())
    ctx._run.peers.all_reduce_max((0,))()  # the first rank has written its files


def validate(ctx, epoch, model, loss_fn, output_args, given):
    from mace.tools import evaluate
    from mace.tools.train import valid_err_log

    for name, loader in given['valid_loaders'].items():  # the last one counts
        ctx.state['loss'], found = evaluate(model, loss_fn, loader, output_args, ctx.device)
        if ctx.is_main:
            how = given['logger'], given['log_errors'], epoch, name
            valid_err_log(ctx.state['loss'], found, *how)
    ctx.report(valid_loss=ctx.state['loss'])
    if ctx.is_main:
        given['logger'].log({'mode': 'opt', 'epoch': epoch, 'loss': ctx.metrics['loss']})


def save(ctx, epoch, model, optimizer, lr_scheduler, first, given):
    from mace.tools import CheckpointState

    if ctx.is_main:
        state = CheckpointState(model, optimizer, lr_scheduler)
        kept = first or given['save_all_checkpoints']
        given['checkpoint_handler'].save(state, epoch, keep_last=kept)
