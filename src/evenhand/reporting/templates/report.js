(()=>{'use strict';
const all=(q,r=document)=>[...r.querySelectorAll(q)],off=new Set();
const show=()=>{
for(const e of all('svg [data-g]'))e.toggleAttribute('data-off',off.has(e.dataset.g));
for(const b of all('button[data-g]'))b.setAttribute('aria-pressed',String(!off.has(b.dataset.g)))};
for(const bar of all('.choose')){bar.hidden=false;
bar.addEventListener('click',e=>{const b=e.target.closest('button');if(!b)return;
if(b.dataset.g!==undefined){off.has(b.dataset.g)?off.delete(b.dataset.g):off.add(b.dataset.g)}
else for(const c of all('button[data-g]'))b.dataset.all==='1'?off.delete(c.dataset.g):off.add(c.dataset.g);
show()})}
for(const pick of all('.pick')){const s=pick.querySelector('select');pick.querySelector('label').hidden=false;
s.addEventListener('change',()=>all('figure',pick).forEach((f,i)=>f.toggleAttribute('hidden',i!==s.selectedIndex)))}
const tip=document.createElement('div');tip.className='tip';tip.hidden=true;document.body.append(tip);
const words=new Map();
for(const g of all('svg [data-n]')){const t=g.querySelector('title');if(t){words.set(g,t.textContent);t.remove()}}
const say=(text,e)=>{tip.hidden=!text;if(!text)return;tip.textContent=text;
const w=tip.offsetWidth,x=Math.min(e.clientX+14,innerWidth-w-8),y=e.clientY+18;
tip.style.left=Math.max(4,x)+'px';tip.style.top=(y+tip.offsetHeight>innerHeight?e.clientY-tip.offsetHeight-10:y)+'px'};
const near=(svg,e)=>{const [l,r,x0,x1,b,t,y0,y1]=svg.dataset.axes.split(' ').map(Number);
const m=svg.getScreenCTM().inverse(),p=new DOMPoint(e.clientX,e.clientY).matrixTransform(m);
let best=null,found=28;
for(const g of all('[data-n]:not([data-off])',svg))for(const q of g.querySelector('polyline').points){
const d=Math.hypot(q.x-p.x,q.y-p.y);if(d<found){found=d;best=[g,q]}}
if(!best)return '';
const at=x0+(best[1].x-l)/(r-l)*(x1-x0),v=y0+(b-best[1].y)/(b-t)*(y1-y0),n=s=>String(+s.toPrecision(3));
return best[0].dataset.n+': about '+n(v)+' at '+svg.dataset.x+' '+n(at)};
for(const svg of all('figure svg'))for(const kind of ['pointermove','pointerdown','pointerleave'])
svg.addEventListener(kind,e=>{if(kind==='pointerleave')return say('',e);
const g=e.target.closest('[data-n]');say(svg.dataset.axes?near(svg,e):g?words.get(g)||g.dataset.n:'',e)});
})();
